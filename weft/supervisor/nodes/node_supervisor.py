"""The supervisor of one node among several: what the nodes agree on takes the place of what one would decide alone."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.checkpoint.snapshot_replication import Errand, Keeper, Sender, needless
from weft.hardware.network import GLOO, NCCL, interfaces
from weft.job.errors import Exit, WeftError
from weft.job.load import load_job
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.supervisor.diagnosis import Fault
from weft.supervisor.local_ranks import QUIET, WISHES, die_with_parent
from weft.supervisor.nodes.address import Place
from weft.supervisor.nodes.consensus import Decision, Proposal, Report, Seat
from weft.supervisor.nodes.membership import Nodes, births
from weft.supervisor.rank_inspection import LOOK_S, kill
from weft.supervisor.replan import replan
from weft.supervisor.status_board import TRAINING, Board, Record
from weft.supervisor.store_server import Meeting
from weft.supervisor.supervisor import WARY_S, Supervisor, say

SETTLED_S = 2.0
"""How long an attempt trains before others are taken in."""
FAREWELL_S = 1.0
"""How long a node that has ended still tells the others."""
OTHERS_S = 1.5
"""Where no rank here is to blame for a standstill, how long the other nodes may take to find theirs."""


class NodeSupervisor(Supervisor):
    """A Supervisor whose attempts are agreed on with the other nodes of the run."""

    calm_s = WARY_S
    """What other nodes say is not rung."""

    def __init__(self, run: RunDir, folder: Path, board: Board, job: Job, plan: Plan, place: Place, slots: int):
        super().__init__(run, folder, board, job.resilience, plan)
        self.copying = True
        """Whether nodes keep copies of one another's snapshots."""
        self.job, self.place, self.slots = job, place, slots
        self.free: list[int] | None = None
        """The slots that wait for the next attempt; None while one is under way."""
        self.failed: WeftError | None = None
        self.guests_since: float | None = None
        self.blameless: float | None = None
        self.left_out, self.attempt_first, self.closed, self.ending = 0.0, 0, False, False
        self.keeper, self.meeting = Keeper(folder), Meeting()
        self.nodes = Nodes(run, place, slots, self.decide, lambda: None, self.note, lost_s=job.resilience.node_lost_s)
        self.nodes.services |= {"store": self.meeting.serve, "copy": self.keeper.serve}
        self.sender = Sender(folder, self.nodes.secret, self.errand, self.nodes.kept, self.note)
        threading.Thread(target=self._renew, daemon=True, name="lease").start()

    def _renew(self) -> None:
        """The ranks may commit as long as all nodes hear of this one, whatever the supervisor is busy with."""
        while not self.closed:
            self.board.lease_until = self.nodes.lease_until()
            self.board["safe"], self.board["target"] = self.nodes.copies()
            time.sleep(LOOK_S)

    def note(self, text: str) -> None:
        say(f"node {self.place.node}: {text}")

    # -- what the loop of the supervisor asks

    def first(self) -> None:
        """All slots begin to import torch while the nodes find each other."""
        for slot in range(self.slots):
            self.board.put(slot, "want", 1)
        self.free = list(range(self.slots))

    def adopt(self, number: int) -> None:
        """Another supervisor was here before. The nodes take this for a node that was started again."""
        super().adopt(number)
        self.board["attempt"] = self.attempt.number + 1
        self.open = [Fault("supervisor", None, f"the supervisor of node {self.place.node} was killed", self.committed)]

    def look(self, records: list[Record]) -> int | None:
        """What is new among the nodes; the exit code, where the run has ended elsewhere."""
        if self.failed is not None:
            return self.end(int(self.failed.exit_code), [f"weft: {self.failed}"])
        code = self.nodes.verdict()
        if code is not None and (code not in QUIET or self.free is not None or not self.attempt.ranks):
            return self.end(code, [])
        if self.nodes.pausing():
            self.board["pause"] = self.attempt.number
        if self.free is not None:
            return self.wait_for_others()
        if self.copying:
            self.nodes.aim(max((records[s].committed for s in self.attempt.ranks.values()), default=0))
        self.invite(records)
        return None

    def fault(self, records: list[Record]) -> Fault | None:
        if self.free is not None:
            return None
        ranks = [records[slot] for slot in self.attempt.ranks.values()]
        died = any(r.deaths > self.attempt.deaths[r.slot] for r in ranks)
        back = [r for r in ranks if r.phase == "waiting" and r.attempt == self.attempt.number]
        step = max((r.step for r in ranks), default=self.committed)
        if self.board["pause"] == self.attempt.number and not died:
            return Fault("grow", None, "others join", step) if len(back) == len(ranks) else None
        if back and not died:  # it came back by itself: a peer of another node is gone
            return Fault("elsewhere", None, self.nodes.trouble() or "a rank of another node is gone", step)
        if why := self.nodes.trouble():
            return Fault("elsewhere", None, why, step)
        return super().fault(records) if ranks else None

    def regroup(self, records: list[Record]) -> None:
        if self.free is None:
            super().regroup(records)

    def settle(self, records: list[Record]) -> None:
        if self.free is None and self.attempt.ranks:
            super().settle(records)

    def stuck(self, ranks: dict[int, Record], seconds: float) -> Fault | None:
        """Most often the rank to blame is on another node, whose supervisor will name it."""
        found = super().stuck(ranks, seconds)
        if found is None or found.rank is not None or len(self.attempt.ranks) == self.attempt.world:
            return found
        now = time.monotonic()
        self.blameless = self.blameless if self.blameless is not None and now - self.blameless < 10 else now
        return found if now - self.blameless > OTHERS_S else None

    def tell(self, fault: Fault) -> None:
        """What happened on another node is told there; a lost node by the one who leads."""
        if fault.kind == "elsewhere":
            say(f"node {self.place.node}: {fault.why}; its ranks stop")
        elif fault.kind != "grow":
            super().tell(fault)

    def next(self, back: dict[int, int]) -> None:
        """The ranks here have stopped: now the nodes must agree."""
        self.free = sorted(back.values())
        fault = self.open[0]
        who = "" if fault.rank is None else f"rank {fault.rank} "
        self.nodes.halt("" if fault.kind == "elsewhere" else f"{who}{fault.why}")

    def wait_for_others(self) -> int | None:
        decision, now = self.nodes.decision, time.monotonic()
        if decision is not None and decision.number > self.attempt.number:
            self.left_out = 0.0
            if self.nodes.lease_until() > now:  # everyone is in
                self.enter(decision)
            return None
        if decision is None and self.attempt.number:
            return self.outside(now)
        if decision is None and now - self.since > self.settings.gather_s and (absent := self.nodes.missing()):
            missing = ", ".join(map(str, absent))
            words = f"node {missing} did not come within {self.settings.gather_s:g} s; it must see {self.run.path}"
            return self.end(int(Exit.MACHINE), [f"weft: {words} and the address {self.place.host}"])
        return None

    def outside(self, now: float) -> int | None:
        """The others went on without this node. It waits to be taken back."""
        if not self.left_out:
            self.left_out = now
            if self.nodes.council.newest:  # else only its supervisor was replaced
                self.note("the others went on without it; it commits nothing and waits to be taken back")
        told = (*(r.code for r in self.nodes.council.reports.values()), self.nodes.ended())
        if over := [code for code in told if code is not None]:
            return self.end(over[0], [])
        if now - self.left_out > self.settings.gather_s:
            words = f"node {self.place.node} was left out and not taken back within {self.settings.gather_s:g} s"
            return self.end(int(Exit.MACHINE), [f"weft: {words}"])
        return None

    def invite(self, records: list[Record]) -> None:
        """Where nodes would like to join: ask the ranks to save and come back, once everyone knows why."""
        guests, now = self.nodes.guests(), time.monotonic()
        ranks = [records[slot] for slot in self.attempt.ranks.values()]
        training = ranks and all(r.attempt == self.attempt.number and r.phase in TRAINING for r in ranks)
        moved = any(r.committed > self.attempt_first for r in ranks)
        if not guests or not training or not moved or now - self.since < SETTLED_S:
            return
        if self.nodes.pause() and self.guests_since is None:
            self.guests_since = now
            self.board["pause"] = self.attempt.number
            names = ", ".join(map(str, guests))
            say(f"node {names} would like to join: the ranks save, and go on together")
            for record in ranks:
                os.kill(record.pid, signal.SIGUSR1)

    # -- the attempts

    def decide(self, proposal: Proposal, reports: Mapping[int, Report]) -> Decision | None:
        """The whole of an attempt: the plan for the ranks there are, which of them run where, and where they meet."""
        nodes, before = proposal.nodes, self.nodes.decision
        slots = {n: reports[n].slots for n in nodes}
        try:
            same = before is not None and before.nodes == set(nodes) and before.world == self.plan.world
            plan = self.plan if same else replan(self.job, sum(slots.values()), len(nodes))[1]
        except WeftError as error:
            self.failed = error
            return None
        left, seats = plan.world, []
        for node in in_place(nodes, slots, before):
            ranks = min(slots[node], left)
            seats.append(Seat(node, plan.world - left, ranks, reports[node].address))
            left -= ranks
        lost, joined = set(proposal.lost), set(proposal.joined)
        how = "start" if before is None else "shrink" if lost else "grow" if joined else "regroup"
        given = {
            "births": births(reports, nodes), "plan": plan.to_json(), "lost": sorted(lost), "joined": sorted(joined),
            "store": [reports[self.place.node].address, reports[self.place.node].port],
        }  # fmt: skip
        return Decision(proposal.number, self.place.node, tuple(seats), proposal.why, how, given)

    def enter(self, decision: Decision) -> None:
        """Begin the attempt that the nodes have agreed on."""
        seat, leads = decision.seat(self.place.node), decision.leader == self.place.node
        assert seat is not None and self.free is not None
        if (ranks := self.places_for(range(seat.first, seat.first + seat.ranks))) is None:
            return
        self.plan = Plan.from_json(decision.given["plan"])
        self.copying = not needless(self.plan, [range(s.first, s.first + s.ranks) for s in decision.seats])
        if leads:
            self.meeting.open(decision.number)
            _write_plan(self.run, self.plan)
            self.tell_of_nodes(decision)
        self.forget_old_snapshots()
        host, port = decision.given["store"]
        environment = {"WEFT_STORE_AT": f"{host}:{port}"}
        name = next((i.name for i in interfaces() if i.address == self.place.host), None)
        environment |= {variable: name for variable in (GLOO, NCCL) if name and variable not in os.environ}
        how = "" if decision.how == "regroup" else decision.how
        self.attempt_first = self.committed
        self.free = self.guests_since = self.blameless = None
        if decision.given["lost"]:
            self.open = [Fault("node_lost", None, decision.why, self.committed)]
        self.board.lease_until = self.nodes.lease_until()  # before a rank looks, or it takes the attempt for over
        self.begin(ranks, number=decision.number, environment=environment, how=how)
        self.announced = self.announced or not leads

    def places_for(self, ranks: range) -> dict[int, int] | None:
        """A slot for each rank; None while processes that cannot be used are still ending.

        A process that was one rank cannot become another: torch remembers, for a mesh of the same shape, where in it
        this process stood.
        """
        records = {r.slot: r for r in self.board.records()}
        lives = {slot: r.rank for slot, r in records.items() if r.rank >= 0 and r.phase != "gone"}
        placed = {rank: slot for slot, rank in lives.items() if rank in ranks}
        unfit = [slot for slot in lives if slot not in placed.values()]
        for slot in unfit:
            kill(records[slot].pid)
        if unfit or self.ending:  # the guardian counts a death a moment after it shows it
            self.ending = bool(unfit)
            return None
        order = {"spare": 0, "start": 1, "gone": 2}
        fresh = sorted(records.keys() - placed.values(), key=lambda slot: order.get(records[slot].phase, 3))
        return {rank: placed[rank] if rank in placed else fresh.pop(0) for rank in ranks}

    def tell_of_nodes(self, decision: Decision) -> None:
        """The faults that no single node has seen on itself, told by the one who leads."""
        for node in decision.given["lost"]:
            self.journal.event(
                "fault", fault="node_lost", rank=None, position=f"node {node}", step=self.committed,
                attempt=decision.number - 1, why=f"node {node} was not heard of for {self.nodes.council.lost_s:g} s",
                detected_after_s=self.nodes.council.lost_s,
            )  # fmt: skip
        if decision.how != "start":
            words = {"shrink": "without node ", "grow": "together with node "}.get(decision.how)
            names = ", ".join(map(str, decision.given["lost"] or decision.given["joined"]))
            say(f"attempt {decision.number} on {len(decision.seats)} nodes{f', {words}{names}' if words else ''}: "
                f"{self.plan.layout()}")  # fmt: skip

    def forget_old_snapshots(self) -> None:
        """Only the last attempt's ranks left something that the next can use."""
        for path in [*self.folder.glob("snap-*"), *self.folder.glob("places-*.json")]:
            number = path.name.split("-")[1].split(".")[0]
            if number.isdigit() and self.attempt.number and int(number) not in self.attempt.ranks:
                path.unlink(missing_ok=True)
        self.keeper.forget(before=self.attempt.number)

    def errand(self) -> Errand | None:
        """Which snapshots the neighbour should get now."""
        found, target = self.nodes.neighbour(), self.nodes.copies()[1]
        if self.free is not None or not self.attempt.ranks or not target or found is None:
            return None
        return Errand(self.attempt.number, frozenset(self.attempt.ranks), *found, target)

    def end(self, code: int, lines: list[str]) -> int:
        """Tell the others, and give them the time to hear it."""
        ended = time.monotonic()
        self.nodes.end(code)
        while not self.nodes.known(ended) and time.monotonic() < ended + FAREWELL_S:
            time.sleep(LOOK_S)
        self.sender.close()
        self.closed = True
        self.nodes.close()
        return super().end(code, lines)


def in_place(nodes: Sequence[int], slots: Mapping[int, int], before: Decision | None) -> list[int]:
    """The nodes in an order in which as many as possible keep their ranks."""
    if before is None or len(set(slots.values())) > 1:
        return list(nodes)
    size = next(iter(slots.values()))
    kept = {seat.first // size: seat.node for seat in before.seats if seat.node in nodes and seat.first % size == 0}
    kept = {position: node for position, node in kept.items() if position < len(nodes)}
    rest = [node for node in nodes if node not in kept.values()]
    return [kept[position] if position in kept else rest.pop(0) for position in range(len(nodes))]


def _write_plan(run: RunDir, plan: Plan) -> None:
    temporary = run.plan.with_suffix(f".{secrets.token_hex(4)}")
    temporary.write_text(plan.dumps(), encoding="utf-8")
    temporary.replace(run.plan)


def main() -> int:
    die_with_parent()
    for number in WISHES:  # the guardian passes them on to the ranks
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WISHES)
    run, folder, where = RunDir(Path(sys.argv[1])), Path(sys.argv[2]), json.loads(sys.argv[3])
    job, plan = load_job(str(run.job)), Plan.from_json(json.loads(run.plan.read_text(encoding="utf-8")))
    place = Place(where["node"], where["count"], where["host"])
    NodeSupervisor(run, folder, Board(folder / "board"), job, plan, place, where["slots"]).watch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
