"""The supervisor of one node among several: attempts are agreed on with the other nodes."""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from weft.checkpoint.snapshot_replication import ReplicaSender, ReplicaStore, ReplicationRequest, survives_node_loss
from weft.guards.out_of_memory import with_microbatch
from weft.hardware.network import GLOO, NCCL, interfaces
from weft.job.compression import parse_compression
from weft.job.errors import Exit, MachineError, WeftError
from weft.job.files.run_folder import RunDir
from weft.job.load import dump_yaml, parse_job
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.supervisor.hang_cause import FaultReport
from weft.supervisor.local_ranks import CLEAN_EXITS
from weft.supervisor.nodes.consensus import RUNNING, SILENT, Decision, NodeRanks, Proposal, Report, keep_ranks_in_place
from weft.supervisor.nodes.membership import Membership, incarnations
from weft.supervisor.nodes.node_address import NodeAddress
from weft.supervisor.rank_inspection import POLL_S, kill
from weft.supervisor.replan import replan
from weft.supervisor.restart_limit import MAX_SAME_STEP, grown_node_lost_s, idle_attempts
from weft.supervisor.status_board import LEFT_ATTEMPT, TRAINING, Record, StatusBoard
from weft.supervisor.store_server import StoreServer
from weft.supervisor.supervisor import ALERT_POLL_S, Supervisor, log, set_up_process

JOIN_DELAY_S = 2.0
"""How long an attempt trains before nodes may join."""
END_NOTICE_S = 1.0
"""How long an ended node keeps sending its last report."""
OTHER_NODES_WAIT_S = 1.5
"""How long other nodes may take to find the rank that caused a hang, if it is not on this node."""


class NodeSupervisor(Supervisor):
    """A Supervisor whose attempts are decided by consensus with the other nodes."""

    idle_poll_s = ALERT_POLL_S
    """Reports of other nodes do not wake the supervisor."""

    def __init__(
        self, run: RunDir, folder: Path, board: StatusBoard, job: Job, plan: Plan, place: NodeAddress, slots: int
    ):
        super().__init__(run, folder, board, job, plan)
        self.copying, self.own_only = True, False
        """Whether nodes hold replicas of one another's snapshots, and only of what no other rank holds."""
        self.place, self.slots = place, slots
        self.free: list[int] | None = None
        """Slots that wait for the next attempt; None while an attempt runs."""
        self.failed: WeftError | None = None
        self.joining_since: float | None = None
        self.blameless: float | None = None
        self.left_out, self.attempt_first, self.closed, self.ending = 0.0, 0, False, False
        self.most_at_once = 0
        """Samples at once that the ranks have memory for, after one ran out of it in the last attempt; else 0."""
        self.steady = 0
        """The last attempt that committed enough steps to use the job's own timeouts again."""
        self.keeper, self.store_server = ReplicaStore(folder), StoreServer()
        self.nodes = Membership(
            run, place, slots, self.decide, lambda: None, self.note, lost_s=job.resilience.node_lost_s,
            elastic=job.cluster.max_nodes is not None, shared=run.shared(job.checkpoint.to),
            encrypt=job.comm.encrypt,
        )  # fmt: skip
        self.nodes.services |= {"store": self.store_server.serve, "copy": self.keeper.serve}
        self.sender = ReplicaSender(
            folder, self.nodes.secret, self.copy_request, self.nodes.set_copied, self.note, job.comm.encrypt
        )
        self.nodes.start()
        threading.Thread(target=self._renew, daemon=True, name="lease").start()

    def _renew(self) -> None:
        """Extend the ranks' lease from a thread, independent of the supervisor's loop."""
        reduced = 0
        while not self.closed:
            self.board.lease_until = self.nodes.lease_until()
            if self.steady > reduced:
                reduced = self.steady
                self.nodes.reduce_lost_s(reduced, self._write_lease)
            self.board["safe"], self.board["target"] = self.nodes.copies()
            time.sleep(POLL_S)

    def _write_lease(self, until: float) -> None:
        self.board.lease_until = until

    def note(self, text: str) -> None:
        log(f"node {self.place.node}: {text}")

    # -- hooks of the supervisor's loop

    def first(self) -> None:
        """Start all slots, which import torch while the nodes connect."""
        for slot in range(self.slots):
            self.board.put(slot, "want", 1)
        self.free = list(range(self.slots))

    def adopt(self, number: int) -> None:
        """Take over from a killed supervisor; the other nodes treat this as a restarted node."""
        super().adopt(number)
        self.board["attempt"] = self.attempt.number + 1
        self.open = [
            FaultReport("supervisor", None, f"the supervisor of node {self.place.node} was killed", self.committed)
        ]

    def look(self, records: list[Record]) -> int | None:
        """Handle changes among the nodes; returns an exit code if the run has ended elsewhere."""
        if self.failed is not None:
            return self.end(int(self.failed.exit_code), [f"weft: {self.failed}"])
        ended = self.nodes.remote_end()
        if ended is not None and (ended.code not in CLEAN_EXITS or self.free is not None or not self.attempt.ranks):
            assert ended.code is not None
            decision = self.nodes.decision
            leads = decision is not None and decision.leader == self.place.node  # one node says it, not hundreds
            lines = [f"node {ended.node}: {line.removeprefix('weft: ')}" for line in ended.lines if leads]
            return self.end(ended.code, lines)
        if self.nodes.pausing():
            self.board["pause"] = self.attempt.number
        if self.free is not None:
            return self.wait_for_others()
        if self.copying:
            self.nodes.set_copy_target(max((records[s].committed for s in self.attempt.ranks.values()), default=0))
        self.pause_for_joining_nodes(records)
        return None

    def fault(self, records: list[Record]) -> FaultReport | None:
        if self.free is not None:
            return None
        ranks = [records[slot] for slot in self.attempt.ranks.values()]
        exited = any(r.deaths > self.attempt.deaths[r.slot] for r in ranks)
        back = [r for r in ranks if r.phase in LEFT_ATTEMPT and r.attempt == self.attempt.number]
        step = max((r.step for r in ranks), default=self.committed)
        if self.board["pause"] == self.attempt.number and not exited:
            return FaultReport("grow", None, "others join", step) if len(back) == len(ranks) else None
        if back and not exited:  # it lost a connection to a rank of another node
            return FaultReport("elsewhere", None, self.nodes.trouble() or "a rank of another node has exited", step)
        if why := self.nodes.trouble():
            return FaultReport("elsewhere", None, why, step)
        return super().fault(records) if ranks else None

    def regroup(self, records: list[Record]) -> None:
        if self.free is None:
            super().regroup(records)

    def settle(self, records: list[Record]) -> None:
        if self.free is None and self.attempt.ranks:
            super().settle(records)

    def hang_fault(self, ranks: dict[int, Record], seconds: float) -> FaultReport | None:
        """Usually the cause is on another node, whose supervisor finds it."""
        found = super().hang_fault(ranks, seconds)
        if found is None or found.rank is not None or len(self.attempt.ranks) == self.attempt.world:
            return found
        now = time.monotonic()
        self.blameless = self.blameless if self.blameless is not None and now - self.blameless < 10 else now
        return found if now - self.blameless > OTHER_NODES_WAIT_S else None

    def log_fault(self, fault: FaultReport) -> None:
        """Faults of another node are logged there; a lost node is logged by the leader."""
        if fault.kind == "elsewhere":
            log(f"node {self.place.node}: {fault.why}; its ranks stop")
        elif fault.kind != "grow":
            super().log_fault(fault)

    def next(self, back: dict[int, int]) -> None:
        """The ranks of this node have stopped: agree on the next attempt with the other nodes."""
        self.free = sorted(back.values())
        before = self.plan.microbatch
        self.take_smaller_plan()
        self.most_at_once = self.plan.microbatch if self.plan.microbatch < before else 0
        fault = self.open[0]
        subject = "" if fault.rank is None else f"rank {fault.rank} "
        why = "" if fault.kind == "elsewhere" else f"{subject}{fault.why}"
        self.nodes.halt(why, self.timed_out(), self.most_at_once)

    def timed_out(self) -> bool:
        return super().timed_out() or any(f.kind == "elsewhere" and f.why.endswith(SILENT) for f in self.open)

    def reset_timeouts(self) -> None:
        super().reset_timeouts()
        self.steady = self.attempt.number

    def wait_for_others(self) -> int | None:
        decision, now = self.nodes.decision, time.monotonic()
        if decision is not None and decision.number > self.attempt.number:
            self.left_out = 0.0
            if self.nodes.lease_until() > now:  # all nodes have entered
                self.enter(decision)
            elif self.nodes.consensus.own.state == RUNNING and self.nodes.trouble():  # one was lost before it could
                self.nodes.halt(timed_out=True, microbatch=self.most_at_once)
            return None
        if decision is None and (code := self.nodes.ended()) is not None:
            return self.end(code, ["the other nodes have ended the run"])
        if decision is None and self.board["stop"]:  # its ranks do not run
            return self.end(self.board["stop"], ["stopped while it waited for the other nodes"])
        if decision is None and self.attempt.number:
            return self.wait_to_rejoin(now)
        if decision is None and (left := self.nodes.left()) is not None:
            return self.end(left[1], [f"weft: node {left[0]} ended with exit code {left[1]} while the nodes gathered"])
        if decision is None and now - self.since > self.settings.gather_s and (absent := self.nodes.missing()):
            missing = ", ".join(map(str, absent))
            shared = self.run.shared(self.job.checkpoint.to)
            needs = "" if self.job.checkpoint.to else " on a disk that all nodes share, or checkpoint.to,"
            words = f"node {missing} did not connect within {self.settings.gather_s:g} s; it needs {shared}{needs} and"
            return self.end(int(Exit.MACHINE), [f"weft: {words} a connection to {self.place.host}"])
        return None

    def wait_to_rejoin(self, now: float) -> int | None:
        """Wait to rejoin after the others continued without this node."""
        if not self.left_out:
            self.left_out = now
            if self.nodes.consensus.newest:  # otherwise only its supervisor was replaced
                self.note("the others continued without it; it waits to rejoin")
        if over := [r.code for r in self.nodes.consensus.reports.values() if r.code is not None]:
            return self.end(over[0], [])
        if now - self.left_out > self.settings.gather_s:
            words = f"node {self.place.node} could not rejoin within {self.settings.gather_s:g} s"
            return self.end(int(Exit.MACHINE), [f"weft: {words}"])
        return None

    def pause_for_joining_nodes(self, records: list[Record]) -> None:
        """If nodes can join, ask the ranks to save and stop, once every node knows why."""
        joining_nodes, now = self.nodes.joining_nodes(), time.monotonic()
        ranks = [records[slot] for slot in self.attempt.ranks.values()]
        training = ranks and all(r.attempt == self.attempt.number and r.phase in TRAINING for r in ranks)
        moved = any(r.committed > self.attempt_first for r in ranks)
        if not joining_nodes or not training or not moved or now - self.since < JOIN_DELAY_S:
            return
        if self.nodes.pause() and self.joining_since is None:
            self.joining_since = now
            self.board["pause"] = self.board["asked"] = self.attempt.number
            names = ", ".join(map(str, joining_nodes))
            log(f"node {names} joins: the ranks save and restart with it")

    # -- attempts

    def decide(self, proposal: Proposal, reports: Mapping[int, Report]) -> Decision | None:
        """Complete an attempt: the plan for the available ranks, the ranks of each node, and the rendezvous address."""
        nodes, before = proposal.nodes, self.nodes.decision
        slots = {n: reports[n].slots for n in nodes}
        try:
            same = before is not None and before.nodes == set(nodes) and before.world == self.plan.world
            plan = self.plan if same else replan(self.job, sum(slots.values()), len(nodes))[1]
            plan = with_microbatch(plan, min((m for n in nodes if (m := reports[n].microbatch)), default=0))
        except WeftError as error:
            self.failed = error
            return None
        left, assignments = plan.world, []
        for node in keep_ranks_in_place(nodes, slots, before):
            ranks = min(slots[node], left)
            assignments.append(NodeRanks(node, plan.world - left, ranks, reports[node].address))
            left -= ranks
        lost, joined, idle = set(proposal.lost), set(proposal.joined), self.idle_before(before, reports)
        if idle >= MAX_SAME_STEP:
            silent = f"the heartbeat timeout was {self.nodes.consensus.lost_s:g} s at last"
            why = f"gave up after {idle} attempts in a row without a committed step: {proposal.why}; {silent}"
            self.failed = MachineError(f"{why}. Start the same command again to resume, on faster nodes or a network")
            return None
        how = "start" if before is None else "shrink" if lost else "grow" if joined else "regroup"
        given = {
            "incarnations": incarnations(reports, nodes),
            "plan": plan.to_json(),
            "job": self.job.model_dump(mode="json"),
            "lost": sorted(lost),
            "joined": sorted(joined),
            "idle": idle,
            "lost_s": grown_node_lost_s(self.settings.node_lost_s, idle),
            "silent_s": max([self.nodes.consensus.lost_s_of(n) for n in lost], default=0.0),
            "store": [reports[self.place.node].address, reports[self.place.node].port],
        }
        return Decision(proposal.number, self.place.node, tuple(assignments), proposal.why, how, given)

    def idle_before(self, before: Decision | None, reports: Mapping[int, Report]) -> int:
        """Attempts in a row that ended by a timeout without a new step. An attempt that ended without a fault of a rank
        has lost a connection between nodes."""
        if before is None:
            return 0
        ends = [r for n, r in reports.items() if n in before.nodes and r.attempt == before.number]
        timed_out = any(r.timed_out for r in ends) or not any(r.why for r in ends)
        return idle_attempts(before.given.get("idle", 0), self.reached - self.reached_before, timed_out)

    def enter(self, decision: Decision) -> None:
        """Start the attempt that the nodes have agreed on."""
        assignment, leads = decision.assignment(self.place.node), decision.leader == self.place.node
        assert assignment is not None and self.free is not None
        if (ranks := self.slots_for(range(assignment.first, assignment.first + assignment.ranks))) is None:
            return
        self.plan, self.job = Plan.from_json(decision.given["plan"]), parse_job(decision.given["job"])
        nodes = [range(s.first, s.first + s.ranks) for s in decision.assignments]
        self.own_only = survives_node_loss(self.plan, nodes)
        self.copying = not self.own_only or parse_compression(self.plan.compression).entry.residual > 0
        if leads:
            self.store_server.open(decision.number)
            _write(self.run.plan, self.plan.dumps())
            _write(self.run.job, dump_yaml(self.job))
            self.log_node_changes(decision)
        self.forget_old_snapshots()
        host, port = decision.given["store"]
        environment = {"WEFT_STORE_AT": f"{host}:{port}"}
        name = next((i.name for i in interfaces() if i.address == self.place.host), None)
        environment |= {variable: name for variable in (GLOO, NCCL) if name and variable not in os.environ}
        how = "" if decision.how == "regroup" else decision.how
        self.attempt_first = self.committed
        self.free = self.joining_since = self.blameless = None
        if decision.given["lost"]:
            self.open = [FaultReport("node_lost", None, decision.why, self.committed)]
        self.board.lease_until = self.nodes.lease_until()  # before a rank checks it
        idle = decision.given["idle"]
        self.grow_timeouts(idle, leads, node_lost_s=decision.given["lost_s"])
        self.begin(ranks, number=decision.number, environment=environment, how=how, idle=idle)
        self.announced = self.announced or not leads

    def slots_for(self, ranks: range) -> dict[int, int] | None:
        """A slot for each rank; None while unusable processes are still exiting.

        A process cannot change its rank: torch caches the coordinates of a mesh of the same shape.
        """
        records = {r.slot: r for r in self.board.records()}
        alive = {slot: r.rank for slot, r in records.items() if r.rank >= 0 and r.phase != "gone"}
        placed = {rank: slot for slot, rank in alive.items() if rank in ranks}
        unusable = [slot for slot in alive if slot not in placed.values()]
        for slot in unusable:
            kill(records[slot].pid)
        if unusable or self.ending:  # the manager counts an exit shortly after the phase shows it
            self.ending = bool(unusable)
            return None
        order = {"spare": 0, "start": 1, "gone": 2}
        fresh = sorted(records.keys() - placed.values(), key=lambda slot: order.get(records[slot].phase, 3))
        return {rank: placed[rank] if rank in placed else fresh.pop(0) for rank in ranks}

    def log_node_changes(self, decision: Decision) -> None:
        """On the leader: log lost and joined nodes."""
        for node in decision.given["lost"]:
            self.journal.event(
                "fault", fault="node_lost", rank=None, position=f"node {node}", step=self.committed,
                attempt=decision.number - 1, why=f"node {node} was silent for {decision.given['silent_s']:g} s",
                detected_after_s=decision.given["silent_s"],
            )  # fmt: skip
        if decision.how != "start":
            words = {"shrink": "without node ", "grow": "together with node "}.get(decision.how)
            names = ", ".join(map(str, decision.given["lost"] or decision.given["joined"]))
            change = f", {words}{names}" if words else ""
            log(f"attempt {decision.number} on {len(decision.assignments)} nodes{change}: {self.plan.layout()}")

    def forget_old_snapshots(self) -> None:
        """Remove snapshots that the next attempt cannot use."""
        for path in [found for kind in ("snap-*", "part-*", "places-*.json") for found in self.folder.glob(kind)]:
            number = path.name.split("-")[1].split(".")[0]
            if number.isdigit() and self.attempt.number and int(number) not in self.attempt.ranks:
                path.unlink(missing_ok=True)
        self.keeper.forget(before=self.attempt.number)

    def copy_request(self) -> ReplicationRequest | None:
        """The snapshots to send to the neighbour now."""
        found, target = self.nodes.neighbour(), self.nodes.copies()[1]
        if self.free is not None or not self.attempt.ranks or not target or found is None:
            return None
        return ReplicationRequest(self.attempt.number, frozenset(self.attempt.ranks), *found, target, self.own_only)

    def end(self, code: int, lines: list[str]) -> int:
        """Report the end to the other nodes and wait briefly for their acknowledgement."""
        ended = time.monotonic()
        self.nodes.end(code, lines)
        while not self.nodes.known(ended, silent=True) and time.monotonic() < ended + END_NOTICE_S:
            time.sleep(POLL_S)
        self.sender.close()
        self.closed = True
        self.nodes.close()
        return super().end(code, lines)


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{secrets.token_hex(4)}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def main() -> int:
    run, folder, job, plan = set_up_process()
    where = json.loads(sys.argv[3])
    place = NodeAddress(where["node"], where["count"], where["host"])
    NodeSupervisor(run, folder, StatusBoard(folder / "board"), job, plan, place, where["slots"]).watch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
