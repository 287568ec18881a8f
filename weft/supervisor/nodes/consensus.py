"""What the nodes of a run agree on: who is there, who leads, what the next attempt is. Pure: no clock, no socket.

Every node tells every other, several times a second, what it knows (Report). An attempt ends for all when one of its
nodes is no longer heard of, or says that it is broken. The lowest node that is still in sight then proposes the next
attempt, and *claims* it: a file of that number in the run's folder, which can be made only once. Whoever makes it has
decided, for all; there is no second decision of the same number, whatever the network does.

- Only nodes of attempt n may claim n + 1; half of them or more at once, a minority only when after a while nobody else
  has: so in a partition the larger side goes on, a tie goes to the faster one, and whoever is left out stops.
- A node commits (metrics, checkpoints) only while its *lease* lasts: for 0.7 × lost_s after the last of its own reports
  that **every** node of the attempt has acknowledged. Nobody leaves a node out before lost_s of silence, which is
  longer: when the next attempt is claimed, no lease of a node left out is alive. Only rates of clocks are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

BEAT_S = 0.2
"""Seconds between reports."""
LOST_S = 2.4
"""Seconds of silence after which a node is taken for lost."""
LEASE = 0.7
"""Of them, for how many a node may commit after its last report that all have acknowledged."""
PATIENCE_S = 15.0
"""Seconds a minority waits for the others to go on without it, before it does."""

RUNNING, HALTED, ENDED = "running", "halted", "ended"


@dataclass(frozen=True)
class Seat:
    """A node in an attempt: the ranks first … first + ranks - 1 run there."""

    node: int
    first: int
    ranks: int
    address: str = ""


@dataclass(frozen=True)
class Decision:
    """One attempt, as it was claimed."""

    number: int
    leader: int
    seats: tuple[Seat, ...]
    why: str = ""
    how: str = "start"
    """start, regroup, shrink or grow: as in the event `recovered`."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """What else the ranks must know: where they meet."""

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset(seat.node for seat in self.seats)

    @property
    def births(self) -> Mapping[str, str]:
        """Which process of each node was meant: one that was started since is not in the attempt."""
        births: Mapping[str, str] = self.given.get("births", {})
        return births

    @property
    def world(self) -> int:
        return sum(seat.ranks for seat in self.seats)

    def seat(self, node: int) -> Seat | None:
        return next((seat for seat in self.seats if seat.node == node), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        seats = tuple(Seat(int(s["node"]), int(s["first"]), int(s["ranks"]), str(s["address"])) for s in data["seats"])
        return cls(
            int(data["number"]), int(data["leader"]), seats, str(data["why"]), str(data["how"]), dict(data["given"])
        )


@dataclass(frozen=True)
class Report:
    """What a node says of itself."""

    node: int
    birth: str = ""
    """Which process speaks for the node: one that was started again is another."""
    attempt: int = 0
    """The attempt it is in; 0 before its first."""
    state: str = HALTED
    """running; halted: its ranks of that attempt have stopped and its snapshots will not change; ended."""
    why: str = ""
    """Why it halted, if it was the one who found out."""
    code: int | None = None
    """The exit code, once the run has ended there."""
    slots: int = 1
    """Ranks it can run."""
    address: str = ""
    port: int = 0
    pausing: bool = False
    """It leads, and has asked the ranks of the attempt to save and stop, so that others can join."""
    kept: int = 0
    """The step of its snapshots that its neighbour has."""
    target: int = 0
    """It leads, and all shall send their first snapshot from this step on: only copies of one step are of use."""
    safe: int = 0
    """It leads, and knows that all have done so up to this step: nobody throws it away."""
    sent: float = 0.0
    """The sender's clock when it spoke."""
    seen: Mapping[int, float] = field(default_factory=dict)
    """By node: the clock of its newest report that has arrived, in that node's own time: its lease hangs on it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        code = data["code"]
        return cls(
            int(data["node"]), str(data["birth"]), int(data["attempt"]), str(data["state"]), str(data["why"]),
            None if code is None else int(code), int(data["slots"]), str(data["address"]), int(data["port"]),
            bool(data["pausing"]), int(data["kept"]), int(data["target"]), int(data["safe"]), float(data["sent"]),
            {int(n): float(clock) for n, clock in data["seen"].items()},
        )  # fmt: skip


@dataclass(frozen=True)
class Proposal:
    """What a leader may try to claim now."""

    number: int
    nodes: tuple[int, ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    why: str


class Council:
    """What one node knows of the others, and what follows from it."""

    def __init__(self, me: int, expected: int, birth: str = "", lost_s: float = LOST_S, patience_s: float = PATIENCE_S):
        self.me, self.expected, self.birth = me, expected, birth
        self.lost_s, self.lease_s, self.patience_s = lost_s, LEASE * lost_s, patience_s
        self.decision: Decision | None = None
        self.mine = Report(me, birth)
        self.reports: dict[int, Report] = {}
        self.heard_at: dict[int, float] = {}
        self.acknowledged: dict[int, float] = {}
        self.newest = 0
        """The last attempt that this node was in: it never goes back to an older one."""
        self._troubled: float | None = None

    def hear(self, report: Report, now: float) -> None:
        """Take in what another node says."""
        before = self.reports.get(report.node)
        if report.node == self.me or (before and before.birth == report.birth and before.sent > report.sent):
            return
        self.reports[report.node], self.heard_at[report.node] = report, now
        # an acknowledgement counts for the attempt it was given in: who is elsewhere vouches for nothing here
        if report.attempt == self.mine.attempt and (clock := report.seen.get(self.me)) is not None:
            self.acknowledged[report.node] = max(clock, self.acknowledged.get(report.node, -math.inf))

    def speak(self, now: float, **changes: Any) -> Report:
        """What this node says of itself now."""
        seen = {n: r.sent for n, r in self.reports.items() if r.attempt == self.mine.attempt and self.sees(n, now)}
        self.mine = replace(self.mine, **changes, sent=now, seen=seen)
        return self.mine

    def adopt(self, decision: Decision, now: float) -> bool:
        """Enter an attempt that was claimed, if it is newer and this node is in it."""
        born = decision.births.get(str(self.me), self.birth)
        if decision.number <= self.newest or decision.seat(self.me) is None or born != self.birth:
            return False
        self.decision, self.newest = decision, decision.number
        self.mine = replace(self.mine, attempt=decision.number, state=RUNNING, why="", code=None, pausing=False)
        self.mine = replace(self.mine, kept=0, target=0, safe=0)
        self.acknowledged.clear()
        self._troubled = None
        # everyone gets lost_s to arrive in the new attempt
        self.heard_at |= {node: max(now, self.heard_at.get(node, now)) for node in decision.nodes if node != self.me}
        return True

    def leave(self, number: int) -> None:
        """The attempt `number` was claimed without this node: from here on it is one who would like to join."""
        self.decision, self.newest = None, max(self.newest, number)
        self.mine = replace(self.mine, attempt=0, state=HALTED, why="")
        self.acknowledged.clear()

    def sees(self, node: int, now: float) -> bool:
        return node == self.me or now - self.heard_at.get(node, -math.inf) < self.lost_s

    def lease_until(self) -> float:
        """Until when this node may commit in its attempt; always, where it is alone in it."""
        if self.decision is None:
            return -math.inf
        others = [n for n in self.decision.nodes if n != self.me and not self._ended(n)]  # who has ended claims nothing
        return min((self.acknowledged.get(n, -math.inf) for n in others), default=math.inf) + self.lease_s

    def trouble(self, now: float) -> str:
        """Why the attempt cannot go on, as far as this node can tell; empty while it can."""
        if self.decision is None or self.mine.state == ENDED:
            return ""
        if lost := self._lost(now):
            names = f"node {lost[0]} is" if len(lost) == 1 else f"nodes {', '.join(map(str, lost))} are"
            return f"{names} no longer heard of"
        for node in sorted(self.decision.nodes - {self.me}):
            report = self.reports.get(node)
            if report is None:
                continue
            if report.attempt == self.mine.attempt and report.state == HALTED:
                return report.why or f"node {node} halted"
            if report.attempt < self.mine.attempt and self._reborn(node):
                return f"node {node} was started again"
        return (self.mine.why or f"the ranks of node {self.me} stopped") if self.mine.state == HALTED else ""

    def joiners(self, now: float) -> tuple[int, ...]:
        """Nodes in sight that would like to take part and do not."""
        inside = self.decision.nodes if self.decision else frozenset()
        return tuple(
            n for n in sorted(self.reports)
            if n not in inside and self.sees(n, now) and self.reports[n].state == HALTED and self.reports[n].slots > 0
        )  # fmt: skip

    def propose(self, now: float) -> Proposal | None:
        """The next attempt, where it is this node's turn to claim it; None where it must wait."""
        return self._form(now) if self.decision is None else self._follow(now)

    def _form(self, now: float) -> Proposal | None:
        """The first attempt since the nodes were started: by the lowest, when all that are expected are there."""
        there = [n for n in range(self.expected) if n == self.me or (n in self.reports and self.sees(n, now))]
        fresh = all(n == self.me or self.reports[n].attempt == 0 for n in there)
        if len(there) < self.expected or not fresh or there[0] != self.me:
            return None
        return Proposal(1, tuple(there), (), (), "")

    def _follow(self, now: float) -> Proposal | None:
        assert self.decision is not None
        why = self.trouble(now)
        if not why or self.mine.state != HALTED:
            self._troubled = None
            return None
        self._troubled = now if self._troubled is None else self._troubled
        members = self.decision.nodes
        there = sorted(n for n in members if self.sees(n, now) and not self._reborn(n))
        if there[0] != self.me or not all(n == self.me or self._halted(n) for n in there):
            return None
        if 2 * len(there) < len(members) and now - self._troubled < self.patience_s:
            return None
        joined = self.joiners(now) + tuple(n for n in sorted(members) if self._reborn(n) and self.sees(n, now))
        lost = tuple(sorted(members - set(there) - set(joined)))
        return Proposal(self.decision.number + 1, tuple(sorted({*there, *joined})), lost, joined, why)

    def _lost(self, now: float) -> list[int]:
        assert self.decision is not None
        return sorted(n for n in self.decision.nodes if not self.sees(n, now) and not self._ended(n))

    def _ended(self, node: int) -> bool:
        """Whether a node said that its part of the run is over, and may be silent since."""
        report = self.reports.get(node)
        return report is not None and report.attempt == self.mine.attempt and report.state == ENDED

    def _halted(self, node: int) -> bool:
        report = self.reports.get(node)
        return report is not None and report.attempt == self.mine.attempt and report.state == HALTED

    def _reborn(self, node: int) -> bool:
        """Whether a node of the attempt speaks with the voice of another process than the one that entered it."""
        assert self.decision is not None
        report = self.reports.get(node)
        return report is not None and self.decision.births.get(str(node), report.birth) != report.birth
