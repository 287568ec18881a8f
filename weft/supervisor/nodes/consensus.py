"""Consensus of the nodes of a run on the next attempt and its leader. Pure logic: no clock, no sockets.

Every node sends every other node its Report several times a second. An attempt ends when one of its nodes is silent for
lost_s or reports a fault. The lowest node that is still visible then proposes the next attempt and *claims* it: it
creates a file of that number in the run's folder, which succeeds only once. So there is one decision for each number,
whatever the network does.

- Only nodes of attempt n may claim n + 1: half of them or more at once, a minority only after MINORITY_WAIT_S. In a
  partition the larger side continues, a tie goes to the faster side, and the other nodes stop.
- A node commits (metrics, checkpoints) only while its *lease* is valid: for 0.7 × lost_s after the last of its own
  reports that **every** node of the attempt has acknowledged. No node is excluded before lost_s of silence, which is
  longer, so an excluded node has no valid lease when the next attempt is claimed. Only clock rates are compared.
- A decision sets lost_s for its attempt; within an attempt a node may only reduce its own. Every report has the lost_s
  of its sender, and others use the newest one they received, so the rule above holds for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

REPORT_INTERVAL_S = 0.2
"""Seconds between reports."""
LOST_S = 2.4
"""Seconds of silence after which a node is considered lost."""
LEASE = 0.7
"""Length of a lease as a fraction of lost_s."""
MINORITY_WAIT_S = 15.0
"""Seconds a minority waits before it continues without the others."""

SILENT = "silent"
"""The last word of the reason of an attempt that ended because of missing reports."""

RUNNING, HALTED, ENDED = "running", "halted", "ended"


@dataclass(frozen=True)
class NodeRanks:
    """A node's ranks in an attempt: first … first + ranks - 1."""

    node: int
    first: int
    ranks: int
    address: str = ""


@dataclass(frozen=True)
class Decision:
    """An attempt, as claimed."""

    number: int
    leader: int
    assignments: tuple[NodeRanks, ...]
    why: str = ""
    how: str = "start"
    """start, regroup, shrink or grow, as in the event `recovered`."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Other data for the ranks, such as the rendezvous address."""

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset(assignment.node for assignment in self.assignments)

    @property
    def incarnations(self) -> Mapping[str, str]:
        """The process meant by each node; a process started later is not part of the attempt."""
        incarnations: Mapping[str, str] = self.given.get("incarnations", {})
        return incarnations

    @property
    def world(self) -> int:
        return sum(assignment.ranks for assignment in self.assignments)

    def assignment(self, node: int) -> NodeRanks | None:
        return next((assignment for assignment in self.assignments if assignment.node == node), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        assignments = tuple(
            NodeRanks(int(s["node"]), int(s["first"]), int(s["ranks"]), str(s["address"])) for s in data["assignments"]
        )
        return cls(
            int(data["number"]),
            int(data["leader"]),
            assignments,
            str(data["why"]),
            str(data["how"]),
            dict(data["given"]),
        )


@dataclass(frozen=True)
class Report:
    """A node's report of its state."""

    node: int
    incarnation: str = ""
    """Identifies the node's process; a restarted node has another value."""
    attempt: int = 0
    """The attempt it is in; 0 before its first."""
    state: str = HALTED
    """running; halted: its ranks of that attempt have stopped and its snapshots will not change; ended."""
    why: str = ""
    """Why it halted, if it detected the fault."""
    code: int | None = None
    """The exit code, once the run has ended on this node."""
    slots: int = 1
    """Ranks that the node can run."""
    address: str = ""
    port: int = 0
    pausing: bool = False
    """The leader has asked the ranks to save and stop, so that other nodes can join."""
    copied: int = 0
    """The step of this node's snapshots that its neighbour holds."""
    target: int = 0
    """From the leader: nodes send their first snapshot from this step on; only copies of one step can be used
    together."""
    safe: int = 0
    """From the leader: all nodes have copied this step, so it must be kept."""
    lost_s: float = 0.0
    """Silence after which the sender may be considered lost in its attempt; 0 before its first."""
    timed_out: bool = False
    """It halted because of a timeout, not of a fault that it found."""
    microbatch: int = 0
    """Samples at once that its ranks have memory for, if one ran out in the attempt that they halted in; else 0."""
    sent: float = 0.0
    """The sender's clock at sending."""
    seen: Mapping[int, float] = field(default_factory=dict)
    """By node: the sender's clock in its newest report received here; its lease depends on it."""
    lines: tuple[str, ...] = ()
    """What it prints at the end."""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "seen": dict(self.seen)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        code = data["code"]
        return cls(
            int(data["node"]), str(data["incarnation"]), int(data["attempt"]), str(data["state"]), str(data["why"]),
            None if code is None else int(code), int(data["slots"]), str(data["address"]), int(data["port"]),
            bool(data["pausing"]), int(data["copied"]), int(data["target"]), int(data["safe"]), float(data["lost_s"]),
            bool(data["timed_out"]), int(data["microbatch"]), float(data["sent"]),
            {int(n): float(clock) for n, clock in data["seen"].items()}, lines=tuple(map(str, data["lines"])),
        )  # fmt: skip


@dataclass(frozen=True)
class Proposal:
    """An attempt that a leader may claim."""

    number: int
    nodes: tuple[int, ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    why: str


class Consensus:
    """One node's view of the others, and the decisions that follow."""

    def __init__(
        self,
        me: int,
        expected: int,
        incarnation: str = "",
        lost_s: float = LOST_S,
        minority_wait_s: float = MINORITY_WAIT_S,
        elastic: bool = False,
    ):
        """`elastic`: any `expected` nodes may start the run, instead of those numbered from 0."""
        self.elastic = elastic
        self.me, self.expected, self.incarnation = me, expected, incarnation
        self.lost_s = self.job_lost_s = lost_s
        """Silence after which a node is lost in this attempt, and as the job sets it."""
        self.minority_wait_s = minority_wait_s
        self.decision: Decision | None = None
        self.own = Report(me, incarnation)
        self.reports: dict[int, Report] = {}
        self.received_at: dict[int, float] = {}
        self.acknowledged: dict[int, float] = {}
        self.newest = 0
        """The last attempt that this node was in; it never returns to an older one."""
        self._trouble_since: float | None = None

    def receive(self, report: Report, now: float) -> None:
        """Record another node's report."""
        before = self.reports.get(report.node)
        if report.node == self.me or (
            before and before.incarnation == report.incarnation and before.sent > report.sent
        ):
            return
        self.reports[report.node], self.received_at[report.node] = report, now
        # an acknowledgement is valid only in the attempt it was given in
        if report.attempt == self.own.attempt and (clock := report.seen.get(self.me)) is not None:
            self.acknowledged[report.node] = max(clock, self.acknowledged.get(report.node, -math.inf))

    def update(self, now: float, **changes: Any) -> Report:
        """Update and return this node's own report."""
        seen = {n: r.sent for n, r in self.reports.items() if r.attempt == self.own.attempt and self.sees(n, now)}
        self.own = replace(self.own, **changes, sent=now, seen=seen)
        return self.own

    def adopt(self, decision: Decision, now: float) -> bool:
        """Enter a claimed attempt if it is newer and this node is part of it."""
        meant = decision.incarnations.get(str(self.me), self.incarnation)
        if decision.number <= self.newest or decision.assignment(self.me) is None or meant != self.incarnation:
            return False
        self.decision, self.newest = decision, decision.number
        self.lost_s = float(decision.given.get("lost_s", self.job_lost_s))
        self.own = replace(self.own, attempt=decision.number, state=RUNNING, why="", code=None, pausing=False)
        self.own = replace(self.own, copied=0, target=0, safe=0, lost_s=self.lost_s, timed_out=False, microbatch=0)
        self.acknowledged.clear()
        self._trouble_since = None
        # all nodes get lost_s to enter the new attempt
        self.received_at |= {
            node: max(now, self.received_at.get(node, now)) for node in decision.nodes if node != self.me
        }
        return True

    def reduce_lost_s(self, write_lease: Callable[[float], None]) -> None:
        """Use the job's lost_s again for the rest of the attempt. The shorter lease must apply before others learn of
        it: `write_lease` is called in between."""
        self.lost_s = min(self.lost_s, self.job_lost_s)
        write_lease(self.lease_until())
        self.own = replace(self.own, lost_s=self.lost_s)

    def lost_s_of(self, node: int) -> float:
        """Silence after which a node is lost: its lease ends before."""
        report = self.reports.get(node)
        return report.lost_s if report and report.lost_s and report.attempt == self.own.attempt else self.lost_s

    def leave(self, number: int) -> None:
        """Attempt `number` was claimed without this node; it now waits to join."""
        self.decision, self.newest = None, max(self.newest, number)
        self.own = replace(self.own, attempt=0, state=HALTED, why="")
        self.acknowledged.clear()

    def sees(self, node: int, now: float) -> bool:
        return node == self.me or now - self.received_at.get(node, -math.inf) < self.lost_s_of(node)

    def lease_until(self) -> float:
        """Until when this node may commit in its attempt; forever if it is the only node."""
        if self.decision is None:
            return -math.inf
        others = [n for n in self.decision.nodes if n != self.me and not self._ended(n)]  # an ended node claims nothing
        return min((self.acknowledged.get(n, -math.inf) for n in others), default=math.inf) + LEASE * self.lost_s

    def trouble(self, now: float) -> str:
        """Why the attempt cannot continue, or empty."""
        if self.decision is None or self.own.state == ENDED:
            return ""
        if lost := self._lost(now):
            names = f"node {lost[0]} is" if len(lost) == 1 else f"nodes {', '.join(map(str, lost))} are"
            return f"{names} {SILENT}"
        for node in sorted(self.decision.nodes - {self.me}):
            report = self.reports.get(node)
            if report is None:
                continue
            if report.attempt == self.own.attempt and report.state == HALTED:
                return report.why or f"node {node} halted"
            if report.attempt < self.own.attempt and self._restarted(node):
                return f"node {node} was started again"
        return (self.own.why or f"the ranks of node {self.me} stopped") if self.own.state == HALTED else ""

    def joiners(self, now: float) -> tuple[int, ...]:
        """Visible nodes that are not in the attempt and can join."""
        inside = self.decision.nodes if self.decision else frozenset()
        return tuple(
            n for n in sorted(self.reports)
            if n not in inside and self.sees(n, now) and self.reports[n].state == HALTED and self.reports[n].slots > 0
        )  # fmt: skip

    def propose(self, now: float) -> Proposal | None:
        """The next attempt if this node may claim it now, else None."""
        return self._form(now) if self.decision is None else self._follow(now)

    @property
    def gathering(self) -> bool:
        """Whether the first attempt waits for all nodes, as far as this one knows."""
        return not self.elastic and not self.newest and not any(r.attempt for r in self.reports.values())

    def _form(self, now: float) -> Proposal | None:
        """The first attempt: claimed by the lowest node when all expected nodes are visible."""
        candidates = sorted({self.me, *self.reports}) if self.elastic else range(self.expected)
        running = {n for n, report in self.reports.items() if report.state != ENDED}
        there = [n for n in candidates if n == self.me or (n in running and self.sees(n, now))]
        fresh = all(n == self.me or self.reports[n].attempt == 0 for n in there)
        if len(there) < self.expected or not fresh or there[0] != self.me:
            return None
        return Proposal(1, tuple(there), (), (), "")

    def _follow(self, now: float) -> Proposal | None:
        assert self.decision is not None
        why = self.trouble(now)
        if not why or self.own.state != HALTED:
            self._trouble_since = None
            return None
        self._trouble_since = now if self._trouble_since is None else self._trouble_since
        members = self.decision.nodes
        there = sorted(n for n in members if self.sees(n, now) and not self._restarted(n))
        if there[0] != self.me or not all(n == self.me or self._halted(n) for n in there):
            return None
        if 2 * len(there) < len(members) and now - self._trouble_since < self.minority_wait_s:
            return None
        joined = self.joiners(now) + tuple(n for n in sorted(members) if self._restarted(n) and self.sees(n, now))
        lost = tuple(sorted(members - set(there) - set(joined)))
        return Proposal(self.decision.number + 1, tuple(sorted({*there, *joined})), lost, joined, why)

    def _lost(self, now: float) -> list[int]:
        assert self.decision is not None
        return sorted(n for n in self.decision.nodes if not self.sees(n, now) and not self._ended(n))

    def _ended(self, node: int) -> bool:
        """Whether a node has reported the end of its part; it may be silent since."""
        report = self.reports.get(node)
        return report is not None and report.attempt == self.own.attempt and report.state == ENDED

    def _halted(self, node: int) -> bool:
        report = self.reports.get(node)
        return report is not None and report.attempt == self.own.attempt and report.state == HALTED

    def _restarted(self, node: int) -> bool:
        """Whether the node's process is not the one that entered the attempt."""
        assert self.decision is not None
        report = self.reports.get(node)
        return (
            report is not None and self.decision.incarnations.get(str(node), report.incarnation) != report.incarnation
        )


def keep_ranks_in_place(nodes: Sequence[int], slots: Mapping[int, int], before: Decision | None) -> list[int]:
    """Order the nodes so that as many as possible keep their ranks."""
    if before is None or len(set(slots.values())) > 1:
        return list(nodes)
    size = next(iter(slots.values()))
    copied = {
        assignment.first // size: assignment.node
        for assignment in before.assignments
        if assignment.node in nodes and assignment.first % size == 0
    }
    copied = {position: node for position, node in copied.items() if position < len(nodes)}
    rest = [node for node in nodes if node not in copied.values()]
    return [copied[position] if position in copied else rest.pop(0) for position in range(len(nodes))]
