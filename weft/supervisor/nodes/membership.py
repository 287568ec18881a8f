"""This node's membership in a run: exchanges reports with the other nodes and enters attempts with them."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.job.files.run_folder import RunDir
from weft.job.files.store_path import AnyPath
from weft.supervisor.nodes.attempt_claims import AttemptClaims
from weft.supervisor.nodes.consensus import (
    ENDED,
    HALTED,
    LOST_S,
    MINORITY_WAIT_S,
    REPORT_INTERVAL_S,
    RUNNING,
    Consensus,
    Decision,
    Proposal,
    Report,
)
from weft.supervisor.nodes.discovery import NodeRegistry
from weft.supervisor.nodes.node_address import NodeAddress
from weft.wire.channel import HANDSHAKE_S, Channel, Disconnected, Message, ProtocolError, open_channel
from weft.wire.listener import Listener
from weft.wire.secret import run_secret

Decide = Callable[[Proposal, Mapping[int, Report]], Decision | None]
"""Completes a proposal with a plan and the ranks of each node; None if no plan fits."""

COPY_TARGET_TIMEOUT_S = 3.0
"""If not all nodes have copied the target step by then, a later step is chosen."""

Serve = Callable[[Channel, Message], None]


class Membership:
    """The consensus of one node with its sockets and threads. `on_news` is called on changes."""

    def __init__(
        self,
        run: RunDir,
        place: NodeAddress,
        slots: int,
        decide: Decide,
        on_news: Callable[[], None],
        note: Callable[[str], None],
        lost_s: float = LOST_S,
        minority_wait_s: float = MINORITY_WAIT_S,
        elastic: bool = False,
        shared: AnyPath | None = None,
        encrypt: bool = False,
    ):
        """`shared`: where the nodes find one another and claim attempts, if that is not the run folder."""
        self.run, self.place, self._decide, self._on_news, self._note = run, place, decide, on_news, note
        self.secret, self.encrypt = run_secret(run.path), encrypt
        self.claims = AttemptClaims((shared or run.path) / "attempts")
        self.services: dict[str, Serve] = {"report": self._receive_reports}
        """Handlers of connections, by purpose."""
        self._registry = NodeRegistry((shared or run.path) / "nodes", place.node, run.path / "nodes")
        incarnation = secrets.token_hex(8)
        self.consensus = Consensus(place.node, place.count, incarnation, lost_s, minority_wait_s, elastic)
        self._changed = threading.Condition()
        self._target_set_at = self._announced = 0.0
        self._closed = False
        self._senders: set[int] = set()
        self._listener = Listener(self.secret, self._serve, note, place.host, encrypt=encrypt)
        host, port = self._listener.address
        self.consensus.update(time.monotonic(), slots=slots, address=host, port=port)

    def start(self) -> None:
        """Enter the run and take part in decisions; from now on `decide` and `services` may be called."""
        self._registry.enter(self._listener.address, self.consensus.own.incarnation)
        for work in (self._find_others, self._decide_attempts):
            threading.Thread(target=work, daemon=True, name=work.__name__.strip("_")).start()

    @property
    def decision(self) -> Decision | None:
        """The attempt this node is in."""
        return self.consensus.decision

    def trouble(self) -> str:
        """Why the attempt cannot continue, or empty."""
        with self._changed:
            return self.consensus.trouble(time.monotonic())

    def remote_end(self) -> Report | None:
        """The report of another node that has ended this attempt, if any. Once this node's ranks have stopped, the
        run's folder is asked too: a node that was silent may not have reported its end."""
        with self._changed:
            decision, halted = self.consensus.decision, self.consensus.own.state == HALTED
            if decision is None:
                return None
            others = [self.consensus.reports[n] for n in decision.nodes & self.consensus.reports.keys()]
            meant = decision.incarnations  # a node may end before it enters the attempt
            found = next(
                (
                    r for r in others
                    if r.state == ENDED and (r.attempt == decision.number or meant.get(str(r.node)) == r.incarnation)
                ),
                None,
            )  # fmt: skip
        if found is not None or not halted or (end := self._registry.end_of(decision.number)) is None:
            return found
        node, code, lines = end
        return Report(node, attempt=decision.number, state=ENDED, code=code, lines=lines)

    def left(self) -> tuple[int, int] | None:
        """While the nodes gather: a node that has ended, and its exit code."""
        with self._changed:
            gathering = self.consensus.gathering
        return self._registry.left() if gathering else None

    def lease_until(self) -> float:
        """Until when (time.monotonic) this node may commit."""
        with self._changed:
            return self.consensus.lease_until()

    def joining_nodes(self) -> tuple[int, ...]:
        """On the leader, nodes that can join; elsewhere empty."""
        with self._changed:
            decision = self.consensus.decision
            if decision is None or decision.leader != self.place.node or self.consensus.own.state != RUNNING:
                return ()
            return self.consensus.joiners(time.monotonic())

    def missing(self) -> list[int]:
        """Expected nodes that are not visible; of an elastic run, none if there are enough others."""
        with self._changed:
            now, known = time.monotonic(), {self.place.node, *self.consensus.reports}
            if self.consensus.elastic and sum(self.consensus.sees(n, now) for n in known) >= self.place.count:
                return []
            return [n for n in range(self.place.count) if not self.consensus.sees(n, now)]

    def halt(self, why: str = "", timed_out: bool = False, microbatch: int = 0) -> None:
        """Report that this node's ranks have stopped."""
        self._update(state=HALTED, microbatch=microbatch, why=why, timed_out=timed_out)

    def reduce_lost_s(self, attempt: int, write_lease: Callable[[float], None]) -> None:
        """Use the job's heartbeat timeout again for the rest of this attempt."""
        with self._changed:
            if self.consensus.newest == attempt:
                self.consensus.reduce_lost_s(write_lease)

    def end(self, code: int, lines: Sequence[str] = ()) -> None:
        """Report the end of the run on this node, and what it prints then."""
        with contextlib.suppress(OSError):
            if self.decision is not None:  # an excluded node does not decide the end of the run
                self._registry.end(code, self.consensus.newest, lines)
            elif self.consensus.gathering:
                self._registry.leave_gathering(code)
        self._update(state=ENDED, code=code, lines=tuple(lines))

    def ended(self) -> int | None:
        """The exit code that other nodes recorded in the run's folder."""
        return self._registry.ended()

    def known(self, since: float, silent: bool = False) -> bool:
        """Whether every visible node (in an attempt: of that attempt) has acknowledged a report sent after `since`.
        With `silent`, the other nodes of an attempt must have, too."""
        with self._changed:
            now, decision = time.monotonic(), self.consensus.decision
            others = decision.nodes - {self.place.node} if decision else self.consensus.reports.keys()
            needed = [n for n in others if (silent and decision) or self.consensus.sees(n, now)]
            return all(self.consensus.acknowledged.get(n, 0.0) > since for n in needed)

    def pause(self) -> bool:
        """Announce that ranks will stop so that nodes can join; True once every node has acknowledged it."""
        if not self.consensus.own.pausing:
            self._announced = time.monotonic()
            self._update(pausing=True)
        return self.known(self._announced)

    def pausing(self) -> bool:
        """Whether the leader has asked the ranks of this attempt to save and stop."""
        with self._changed:
            decision, reports = self.consensus.decision, self.consensus.reports
            if decision is None:
                return False
            leader = self.consensus.own if decision.leader == self.place.node else reports.get(decision.leader)
            return leader is not None and leader.attempt == decision.number and leader.pausing

    def set_copied(self, step: int) -> None:
        """Report that the neighbour holds this node's snapshots of a step."""
        self._update(copied=step)

    def set_copy_target(self, committed: int) -> None:
        """On the leader: when all nodes have copied the target step, choose the next."""
        with self._changed:
            own, decision, now = self.consensus.own, self.consensus.decision, time.monotonic()
            if decision is None or decision.leader != self.place.node or own.state != RUNNING:
                return
            others = [self.consensus.reports.get(n) for n in decision.nodes - {self.place.node}]
            if not others or any(r is None or r.attempt != decision.number for r in others):
                return
            copied = {own.copied, *(r.copied for r in others if r is not None)}
            done = own.target > 0 and len(copied) == 1 and min(copied) >= own.target
            late = now - self._target_set_at > COPY_TARGET_TIMEOUT_S
            if own.target and not done and not late:
                return
            self._target_set_at = now
        # a node may have discarded the step before it learned of it; then a later one is needed
        self._update(target=committed + (3 if late and own.target else 1), **({"safe": min(copied)} if done else {}))

    def copies(self) -> tuple[int, int]:
        """The step that all neighbours hold, and the step from which the next copy is sent."""
        with self._changed:
            decision, reports = self.consensus.decision, self.consensus.reports
            if decision is None:
                return 0, 0
            leader = self.consensus.own if decision.leader == self.place.node else reports.get(decision.leader)
            return (leader.safe, leader.target) if leader and leader.attempt == decision.number else (0, 0)

    def neighbour(self) -> tuple[int, tuple[str, int]] | None:
        """The node that holds copies of this node's snapshots, and its address."""
        with self._changed:
            decision = self.consensus.decision
            if decision is None or len(decision.assignments) < 2:
                return None
            order = [assignment.node for assignment in decision.assignments]
            following = order[(order.index(self.place.node) + 1) % len(order)]
            report = self.consensus.reports.get(following)
            return None if report is None else (following, (report.address, report.port))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._listener.close()
        self._registry.leave()

    def _update(self, **changes: Any) -> None:
        with self._changed:
            self.consensus.update(time.monotonic(), **changes)
            self._changed.notify_all()

    def _find_others(self) -> None:
        """Start a sender thread for each node in the registry."""
        while not self._closed:
            with contextlib.suppress(OSError):
                found = self._registry.others()
                for node in (node for node in found if node not in self._senders):
                    self._senders.add(node)
                    threading.Thread(target=self._send_reports_to, args=(node,), daemon=True, name=f"to-{node}").start()
            time.sleep(max(REPORT_INTERVAL_S, self._registry.interval_s))

    def _send_reports_to(self, node: int) -> None:
        """Send reports to one node and reconnect when the connection breaks."""
        while not self._closed:
            address = self._registry.address_of(node)
            try:
                if address is None:
                    raise Disconnected("it has left no address")
                channel = open_channel(address, self.secret, self.consensus.lost_s / 2, encrypt=self.encrypt)
                try:
                    channel.send({"purpose": "report", "node": self.place.node})
                    self._send_reports(channel)
                finally:
                    channel.close()
            except Disconnected:
                pass
            except ProtocolError as error:
                self._note(f"node {node} at {address} was refused: {error}")
            time.sleep(REPORT_INTERVAL_S)

    def _send_reports(self, channel: Channel) -> None:
        sent = -1
        while not self._closed:
            with self._changed:
                report, decision = self.consensus.update(time.monotonic()), self.consensus.decision
            message: Message = {"report": report.to_json()}
            if decision is not None and decision.number != sent:
                message["decision"], sent = decision.to_json(), decision.number
            channel.send(message, timeout_s=self.consensus.lost_s)
            with self._changed:
                self._changed.wait(REPORT_INTERVAL_S)

    def _serve(self, channel: Channel) -> None:
        hello, _ = channel.receive(HANDSHAKE_S)
        self.services[str(hello["purpose"])](channel, hello)

    def _receive_reports(self, channel: Channel, hello: Message) -> None:
        """Receive one node's reports until it disconnects."""
        node = int(hello["node"])
        while not self._closed:
            message, _ = channel.receive(5 * self.consensus.lost_s)
            report = Report.from_json(message["report"])
            if report.node != node:
                raise ProtocolError(f"node {node} reports as node {report.node}")
            with self._changed:
                now = time.monotonic()
                before = self.consensus.reports.get(node)
                self.consensus.receive(report, now)
                adopted = "decision" in message and self.consensus.adopt(Decision.from_json(message["decision"]), now)
                news = adopted or before is None or (before.attempt, before.state) != (report.attempt, report.state)
                if news:
                    self._changed.notify_all()
            if news:
                self._on_news()

    def _decide_attempts(self) -> None:
        """Detect faults, follow claimed attempts, and claim one when it is this node's turn."""
        troubled = False
        while not self._closed:
            with self._changed:
                trouble = bool(self.consensus.trouble(time.monotonic()))
            if trouble and not troubled:
                self._on_news()
            troubled = trouble
            try:
                self._follow_or_claim()
            except OSError as error:
                self._note(f"the run folder cannot be used, so the nodes cannot agree: {error}")
            with self._changed:
                self._changed.wait(REPORT_INTERVAL_S / 2)

    def _follow_or_claim(self) -> None:
        with self._changed:
            halted, decision = self.consensus.own.state == HALTED, self.consensus.decision
        if halted and decision is not None and (following := self.claims.read(decision.number + 1)) is not None:
            self._enter(following)
            return
        with self._changed:
            proposal = self.consensus.propose(time.monotonic())
            reports = {**self.consensus.reports, self.place.node: self.consensus.own}
        if proposal is None:
            return
        if decision is None and self.consensus.elastic and not self._last_attempt_is_over(proposal.nodes):
            return
        if decision is not None and self.remote_end() is not None:
            return  # the supervisor ends the run here too
        number = proposal.number if decision is not None else self.claims.newest() + 1
        made = self._decide(Proposal(number, proposal.nodes, proposal.lost, proposal.joined, proposal.why), reports)
        with self._changed:
            again = self.consensus.propose(time.monotonic())
        if made is None or again is None or again.nodes != proposal.nodes:
            return  # the set of nodes changed while the plan was made
        claimed = made if self.claims.make(made) else self.claims.read(number)
        if claimed is not None:
            self._enter(claimed)

    def _last_attempt_is_over(self, nodes: tuple[int, ...]) -> bool:
        """Whether no node outside of `nodes` can still commit: an elastic run starts without some of its nodes."""
        newest = self.claims.newest()
        last = self.claims.read(newest)
        return not newest or (last is not None and last.nodes <= set(nodes)) or self._registry.ended_in(newest)

    def _enter(self, decision: Decision) -> None:
        with self._changed:
            if not self.consensus.adopt(decision, time.monotonic()) and decision.assignment(self.place.node) is None:
                self.consensus.leave(decision.number)
            self._changed.notify_all()
        self._on_news()


def incarnations(reports: Mapping[int, Report], nodes: tuple[int, ...]) -> dict[str, str]:
    """The process of each node that a decision means."""
    return {str(n): reports[n].incarnation for n in nodes}
