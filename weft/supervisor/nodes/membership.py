"""This node among the others of a run: it tells them how it is, hears how they are, and enters attempts with them."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from weft.job.run_folder import RunDir
from weft.supervisor.nodes.address import Place
from weft.supervisor.nodes.attempt_claims import Claims
from weft.supervisor.nodes.consensus import (
    BEAT_S,
    ENDED,
    HALTED,
    LOST_S,
    PATIENCE_S,
    RUNNING,
    Council,
    Decision,
    Proposal,
    Report,
)
from weft.supervisor.nodes.discovery import Registry
from weft.wire.channel import HANDSHAKE_S, Channel, Gone, Message, Refused, dial
from weft.wire.listener import Listener
from weft.wire.secret import run_secret

Decide = Callable[[Proposal, Mapping[int, Report]], Decision | None]
"""Fills in what a proposal leaves open: which ranks go where, under which plan; None where there is no way."""

AIM_S = 3.0
"""If not all have sent a step by then, a later one is tried."""

Serve = Callable[[Channel, Message], None]


class Nodes:
    """One node's seat in the council, with its sockets and threads. `on_news` is called when something has changed."""

    def __init__(
        self,
        run: RunDir,
        place: Place,
        slots: int,
        decide: Decide,
        on_news: Callable[[], None],
        note: Callable[[str], None],
        lost_s: float = LOST_S,
        patience_s: float = PATIENCE_S,
    ):
        self.run, self.place, self._decide, self._on_news, self._note = run, place, decide, on_news, note
        self.secret = run_secret(run.path)
        self.claims = Claims(run.path / "attempts")
        self.services: dict[str, Serve] = {"report": self._listen}
        """By purpose: who answers a connection."""
        self._registry = Registry(run.path / "nodes", place.node)
        birth = secrets.token_hex(8)
        self.council = Council(place.node, place.count, birth, lost_s, patience_s)
        self._changed = threading.Condition()
        self._aimed = self._announced = 0.0
        self._closed = False
        self._senders: set[int] = set()
        self._listener = Listener(self.secret, self._serve, note, place.host)
        host, port = self._listener.address
        self.council.speak(time.monotonic(), slots=slots, address=host, port=port)
        self._registry.enter((host, port), birth)
        for work in (self._find_others, self._chair):
            threading.Thread(target=work, daemon=True, name=work.__name__.strip("_")).start()

    @property
    def decision(self) -> Decision | None:
        """The attempt this node is in."""
        return self.council.decision

    def trouble(self) -> str:
        """Why the attempt cannot go on."""
        with self._changed:
            return self.council.trouble(time.monotonic())

    def verdict(self) -> int | None:
        """The exit code with which another node has ended this attempt, if one has."""
        with self._changed:
            decision = self.council.decision
            if decision is None:
                return None
            told = [r for n, r in self.council.reports.items() if n in decision.nodes and r.attempt == decision.number]
            return next((r.code for r in told if r.state == ENDED), None)

    def lease_until(self) -> float:
        """Until when, by time.monotonic(), this node may commit."""
        with self._changed:
            return self.council.lease_until()

    def guests(self) -> tuple[int, ...]:
        """Nodes that would like to join, as the one who leads sees it; the others leave it to him."""
        with self._changed:
            decision = self.council.decision
            if decision is None or decision.leader != self.place.node or self.council.mine.state != RUNNING:
                return ()
            return self.council.joiners(time.monotonic())

    def missing(self) -> list[int]:
        """Nodes that are expected and not in sight."""
        with self._changed:
            return [n for n in range(self.place.count) if not self.council.sees(n, time.monotonic())]

    def halt(self, why: str = "") -> None:
        """The ranks of this node have stopped: the attempt is over here."""
        self._say(state=HALTED, why=why)

    def end(self, code: int) -> None:
        """The run is over here."""
        if self.decision is not None:  # one that was left out does not speak for the run
            with contextlib.suppress(OSError):
                self._registry.end(code)
        self._say(state=ENDED, code=code)

    def ended(self) -> int | None:
        """The exit code with which the others ended the run, though this node could not be told."""
        return self._registry.ended()

    def known(self, since: float) -> bool:
        """Whether every node of the attempt has heard what this one has said since then, or is gone."""
        with self._changed:
            now, decision = time.monotonic(), self.council.decision
            others = decision.nodes - {self.place.node} if decision else frozenset()
            return all(self.council.acknowledged.get(n, 0.0) > since or not self.council.sees(n, now) for n in others)

    def pause(self) -> bool:
        """Announce that the ranks will be asked to save and stop for guests; true once every node has heard it."""
        if not self.council.mine.pausing:
            self._announced = time.monotonic()
            self._say(pausing=True)
        return self.known(self._announced)

    def pausing(self) -> bool:
        """Whether the ranks of this attempt were asked to save and stop, and the run will go on."""
        with self._changed:
            decision, reports = self.council.decision, self.council.reports
            if decision is None:
                return False
            leader = self.council.mine if decision.leader == self.place.node else reports.get(decision.leader)
            return leader is not None and leader.attempt == decision.number and leader.pausing

    def kept(self, step: int) -> None:
        """The neighbour has this node's snapshots of a step."""
        self._say(kept=step)

    def aim(self, committed: int) -> None:
        """As the one who leads: when all have sent one step, name the next that is worth it."""
        with self._changed:
            mine, decision, now = self.council.mine, self.council.decision, time.monotonic()
            if decision is None or decision.leader != self.place.node or mine.state != RUNNING:
                return
            others = [self.council.reports.get(n) for n in decision.nodes - {self.place.node}]
            if not others or any(r is None or r.attempt != decision.number for r in others):
                return
            kept = {mine.kept, *(r.kept for r in others if r is not None)}
            done = mine.target > 0 and len(kept) == 1 and min(kept) >= mine.target
            late = now - self._aimed > AIM_S
            if mine.target and not done and not late:
                return
            self._aimed = now
        # who has thrown the step away before he heard of it cannot send it: then a later one
        self._say(target=committed + (3 if late and mine.target else 1), **({"safe": min(kept)} if done else {}))

    def copies(self) -> tuple[int, int]:
        """The step that all neighbours have, and the one from which on the next is sent."""
        with self._changed:
            decision, reports = self.council.decision, self.council.reports
            if decision is None:
                return 0, 0
            leader = self.council.mine if decision.leader == self.place.node else reports.get(decision.leader)
            return (leader.safe, leader.target) if leader and leader.attempt == decision.number else (0, 0)

    def neighbour(self) -> tuple[int, tuple[str, int]] | None:
        """The node that keeps copies of this one's snapshots, and where it listens."""
        with self._changed:
            decision = self.council.decision
            if decision is None or len(decision.seats) < 2:
                return None
            order = [seat.node for seat in decision.seats]
            following = order[(order.index(self.place.node) + 1) % len(order)]
            report = self.council.reports.get(following)
            return None if report is None else (following, (report.address, report.port))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._listener.close()
        self._registry.leave()

    def _say(self, **changes: Any) -> None:
        with self._changed:
            self.council.speak(time.monotonic(), **changes)
            self._changed.notify_all()

    def _find_others(self) -> None:
        """A thread for every node that has left its address in the run's folder."""
        while not self._closed:
            for node in self._registry.others():
                if node not in self._senders:
                    self._senders.add(node)
                    threading.Thread(target=self._tell, args=(node,), daemon=True, name=f"to-{node}").start()
            time.sleep(BEAT_S)

    def _tell(self, node: int) -> None:
        """Report to one node, again and again, over connections that are made anew when they break."""
        while not self._closed:
            address = self._registry.address_of(node)
            try:
                if address is None:
                    raise Gone("it has left no address")
                channel = dial(address, self.secret, timeout_s=self.council.lost_s / 2)
                try:
                    channel.send({"purpose": "report", "node": self.place.node})
                    self._keep_telling(channel)
                finally:
                    channel.close()
            except Gone:
                pass
            except Refused as error:
                self._note(f"node {node} at {address} was not believed: {error}")
            time.sleep(BEAT_S)

    def _keep_telling(self, channel: Channel) -> None:
        told = -1
        while not self._closed:
            with self._changed:
                report, decision = self.council.speak(time.monotonic()), self.council.decision
            message: Message = {"report": report.to_json()}
            if decision is not None and decision.number != told:
                message["decision"], told = decision.to_json(), decision.number
            channel.send(message, timeout_s=self.council.lost_s)
            with self._changed:
                self._changed.wait(BEAT_S)

    def _serve(self, channel: Channel) -> None:
        hello, _ = channel.receive(HANDSHAKE_S)
        self.services[str(hello["purpose"])](channel, hello)

    def _listen(self, channel: Channel, hello: Message) -> None:
        """Hear one node's reports until it stops."""
        node = int(hello["node"])
        while not self._closed:
            message, _ = channel.receive(5 * self.council.lost_s)
            report = Report.from_json(message["report"])
            if report.node != node:
                raise Refused(f"node {node} speaks for node {report.node}")
            with self._changed:
                now = time.monotonic()
                before = self.council.reports.get(node)
                self.council.hear(report, now)
                adopted = "decision" in message and self.council.adopt(Decision.from_json(message["decision"]), now)
                news = adopted or before is None or (before.attempt, before.state) != (report.attempt, report.state)
                if news:
                    self._changed.notify_all()
            if news:
                self._on_news()

    def _chair(self) -> None:
        """Notice trouble, follow what others have claimed, and claim where it is this node's turn."""
        troubled = False
        while not self._closed:
            with self._changed:
                trouble = bool(self.council.trouble(time.monotonic()))
            if trouble and not troubled:
                self._on_news()
            troubled = trouble
            try:
                self._follow_or_claim()
            except OSError as error:
                self._note(f"the run's folder cannot be used, so nothing can be agreed on: {error}")
            with self._changed:
                self._changed.wait(BEAT_S / 2)

    def _follow_or_claim(self) -> None:
        with self._changed:
            halted, decision = self.council.mine.state == HALTED, self.council.decision
        if halted and decision is not None and (following := self.claims.read(decision.number + 1)) is not None:
            self._enter(following)
            return
        with self._changed:
            proposal = self.council.propose(time.monotonic())
            reports = {**self.council.reports, self.place.node: self.council.mine}
        if proposal is None:
            return
        number = proposal.number if decision is not None else self.claims.newest() + 1
        made = self._decide(Proposal(number, proposal.nodes, proposal.lost, proposal.joined, proposal.why), reports)
        with self._changed:
            again = self.council.propose(time.monotonic())
        if made is None or again is None or again.nodes != proposal.nodes:
            return  # while the plan was made, someone came or went
        claimed = made if self.claims.make(made) else self.claims.read(number)
        if claimed is not None:
            self._enter(claimed)

    def _enter(self, decision: Decision) -> None:
        with self._changed:
            if not self.council.adopt(decision, time.monotonic()) and decision.seat(self.place.node) is None:
                self.council.leave(decision.number)
            self._changed.notify_all()
        self._on_news()


def births(reports: Mapping[int, Report], nodes: tuple[int, ...]) -> dict[str, str]:
    """Which process of each node is meant by a decision."""
    return {str(n): reports[n].birth for n in nodes}
