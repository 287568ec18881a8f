"""The supervisor of one machine: reads the status board, finds faults and starts the next attempt.

All its state can be read again from the board and the attempt file, so a killed supervisor can be replaced.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.supervisor.attempt import (
    NOT_CONNECTED,
    Attempt,
    read_attempt,
    started_at,
    started_job,
    started_plan,
    write_attempt,
)
from weft.supervisor.failure_report import explain_failure, read_failure, remove_failures
from weft.supervisor.hang_cause import FaultReport
from weft.supervisor.hang_detection import HangDetector, first_steps_timeout_s
from weft.supervisor.local_ranks import CLEAN_EXITS, GRACE_S, die_with_parent
from weft.supervisor.memory_folder import write_file
from weft.supervisor.process_name import set_process_name
from weft.supervisor.rank_inspection import (
    POLL_S,
    awaited_ranks,
    connect_fault,
    data_fault,
    exit_fault,
    hang_fault,
    kill,
)
from weft.supervisor.restart_limit import (
    STEADY_STEPS,
    TIMEOUT_FAULTS,
    backoff_s,
    burst_of,
    entry,
    final_lines,
    give_up_code,
    idle_attempts,
    timeout_factor,
)
from weft.supervisor.status_board import LEFT_ATTEMPT, TRAINING, Record, StatusBoard
from weft.supervisor.stop_signals import STOP_SIGNALS
from weft.watch.journal import Journal, record_early_stop
from weft.watch.live_block import over_block

REGROUP_TIMEOUT_S = 3.0
"""How long ranks may take to return from an attempt that is over, before they are replaced."""
MAX_UNCONNECTED = 2
"""Attempts in which the ranks of a run that was asked to stop may fail to connect, until it ends without saving."""
LOST_S = 5.0
"""How long a rank may wait after losing its connections before the attempt is ended."""
SPARE_DELAY_S = 2.0
"""How long a new attempt trains before the next spare is started: importing torch takes CPU."""
IDLE_POLL_S, ALERT_POLL_S = 0.2, 0.05
"""Poll intervals in normal operation, and during a standstill or recovery. Each poll costs CPU; a process that exits
wakes the supervisor at once."""
NOT_RANK_FAULTS = ("elsewhere", "grow")
"""Ends of an attempt that are not caused by a rank of this node."""


class Supervisor:
    """Watches the slots of a status board."""

    idle_poll_s = IDLE_POLL_S

    def __init__(self, run: RunDir, folder: Path, board: StatusBoard, job: Job, plan: Plan):
        self.run, self.folder, self.board, self.job, self.plan = run, folder, board, job, plan
        self.settings = job.resilience
        self.journal = Journal(run)
        self.hangs = HangDetector(self.settings.patience_s, first_steps_timeout_s(plan))
        self.attempt = Attempt(0, plan.world, {}, {}, "", time.time())
        self.open: list[FaultReport] = []
        """Faults of the attempt that is over, until the next one is published."""
        self.burst = (0, 0.0)
        """The burst of kills that they belong to: the attempt that its first kill ended, and when."""
        self.unconnected = 0
        """Attempts that ended because ranks did not connect, after the run was asked to stop."""
        self.since = time.monotonic()
        self.announced = True
        self.committed = self.committed_before = 0
        """The newest committed step, and the newest of the attempts before this one."""
        self.reached = self.reached_before = 0
        """The same, never reduced when a run continues from an older step."""
        self.lost_since: float | None = None
        self.replaced: set[int] = set()
        """Ranks that were lost or killed in this attempt."""

    def watch(self) -> int:
        """Supervise until the run is over. Returns its exit code."""
        if number := self.board["published"]:
            self.adopt(number)
        else:
            self.first()
        wakeup = self.board.wakeup("supervisor")
        while True:
            self.beat()
            records = self.board.records()
            self.committed = max([self.committed, *(r.committed for r in records)])
            self.reached = max(self.reached, self.committed)
            if self.hangs.timeout_factor > 1 and self.reached - self.reached_before >= STEADY_STEPS:
                self.reset_timeouts()
            code = self.ended(records)
            if code is None:
                code = self.look(records)
            if code is not None:
                return code
            if self.open:
                self.regroup(records)
            elif fault := self.fault(records):
                self.broken(fault)
            else:
                self.settle(records)
            wary = self.hangs.is_late or not self.announced
            self.hangs.poll_s = POLL_S if self.open else ALERT_POLL_S if wary else self.idle_poll_s
            wakeup.wait(self.hangs.poll_s)

    def beat(self) -> None:
        """Show the process manager that this process runs."""
        self.board["supervisor_beats"] += 1

    def first(self) -> None:
        """Start the first attempt."""
        self.attempt = replace(self.attempt, began=started_at(self.folder))
        self.begin({rank: rank for rank in range(self.plan.world)})

    def look(self, records: list[Record]) -> int | None:
        """Hook for other events; returns an exit code to end the run."""
        return None

    # -- detection

    def fault(self, records: list[Record]) -> FaultReport | None:
        """The first fault of the current attempt, if any."""
        ranks = {rank: records[slot] for rank, slot in self.attempt.ranks.items()}
        for rank, record in ranks.items():
            if record.deaths > self.attempt.deaths[record.slot]:
                self.replaced.add(rank)
                return exit_fault(self.run, self.folder, rank, record)
        lost = any(r.phase in LEFT_ATTEMPT and r.attempt == self.attempt.number for r in ranks.values())
        self.lost_since = (self.lost_since or time.monotonic()) if lost else None
        timeout = self.hangs.timeout_factor * LOST_S
        if self.lost_since is not None and time.monotonic() - self.lost_since > timeout:
            step = min(record.step for record in ranks.values())
            return FaultReport(
                "hang", None, "ranks lost their connections, though no rank has exited", step, "", timeout
            )
        seconds = self.hangs.check(ranks, lambda: awaited_ranks(self.folder, ranks))
        if self.board["stop"] and self.hangs.delays_a_stop:
            if found := data_fault(self.folder, ranks):
                self.replaced |= {rank for rank, record in ranks.items() if record.phase == "data"}
                return found
            if found := connect_fault(ranks, self.hangs):
                self.unconnected += 1
                self.replaced |= {rank for rank, record in ranks.items() if record.phase not in TRAINING}
                return found
        return self.hang_fault(ranks, seconds) if seconds is not None else None

    def hang_fault(self, ranks: dict[int, Record], seconds: float) -> FaultReport | None:
        """Handle a standstill: find and kill the rank that caused it."""
        found, killed = hang_fault(self.folder, ranks, self.hangs, seconds)
        self.replaced |= killed
        return found

    # -- recovery

    def broken(self, fault: FaultReport) -> None:
        """End the current attempt: from now on its ranks must not commit."""
        self.board["attempt"] = self.attempt.number + 1
        self.since = time.monotonic()
        self.burst = burst_of(self.attempt, fault, self.since, self.hangs.load)
        self.add(fault)

    def add(self, fault: FaultReport) -> None:
        """Keep a fault of the attempt that is over. Ranks that connect do not know the run's step."""
        self.open.append(replace(fault, step=fault.step or self.committed))
        self.log_fault(self.open[-1])

    def log_fault(self, fault: FaultReport) -> None:
        after = None if fault.detected_after_s is None else round(fault.detected_after_s, 3)
        if fault.kind != "oom":  # the rank has written that event itself
            self.journal.event(
                "fault", fault=_event_kind(fault.kind), rank=fault.rank, position=fault.position, step=fault.step,
                attempt=self.attempt.number, why=fault.why, detected_after_s=after,
                **({"stack": fault.stack} if fault.stack else {}),
            )  # fmt: skip
        joint = " " if fault.kind == "exit" else ": "
        log(f"{fault.subject}{joint}{fault.why}")

    def regroup(self, records: list[Record]) -> None:
        """Wait until the remaining ranks are back, fill empty ranks with spares, and start the next attempt."""
        slots, back = self.attempt.ranks, dict[int, int]()
        impatient = time.monotonic() - self.since > self.hangs.regroup_timeout(
            REGROUP_TIMEOUT_S, stopping=self.board["stop"] > 0
        )
        coming_back = False
        for rank, slot in slots.items():
            record = records[slot]
            if record.deaths > self.attempt.deaths[slot]:
                if rank not in self.replaced:
                    self.replaced.add(rank)
                    if record.code != NOT_CONNECTED:
                        self.add(exit_fault(self.run, self.folder, rank, record))
            elif _can_join(record, self.attempt.number):
                back[rank] = slot
            else:
                coming_back = True
                if impatient and rank not in self.replaced:
                    self.replaced.add(rank)
                    kill(record.pid)
        if coming_back:
            return
        free = [r.slot for r in records if r.slot not in back.values()]
        ready = [slot for slot in free if records[slot].phase == "spare"]
        coming = [slot for slot in free if records[slot].want and slot not in ready]
        for rank in sorted(slots.keys() - back.keys()):
            if ready:
                back[rank] = ready.pop(0)
            elif coming:
                back[rank] = coming.pop(0)
            else:
                slot = next(s for s in free if not records[s].want and s not in back.values())
                self.board.put(slot, "want", 1)
                back[rank] = slot
        if self.unconnected == MAX_UNCONNECTED:
            code, last = self.board["stop"], f"the ranks did not connect in {MAX_UNCONNECTED} attempts"
            record_early_stop(self.run, code)
            self.end(code, [f"stopped without saving, since {last}; the same command resumes from the last checkpoint"])
            return
        earlier, burst = self.attempt.faults, self.burst[0]
        if code := give_up_code(self.open, earlier, self.settings.restarts, burst):
            self.end(*final_lines(self.run, self.board, self.attempt, self.open[0], code, burst))
            return
        backoff = 0.0 if self.board["stop"] else backoff_s(self.open, earlier, self.idle_attempts(), burst)
        if time.monotonic() - self.since < backoff:
            return
        self.next(back)

    def idle_attempts(self) -> int:
        """Attempts in a row that ended by a timeout without a new step, with the one that has just ended."""
        return idle_attempts(self.attempt.idle, self.reached - self.reached_before, self.timed_out())

    def timed_out(self) -> bool:
        """Whether a timeout ended the attempt, which may be too short for this machine."""
        return any(fault.kind in TIMEOUT_FAULTS for fault in self.open)

    def grow_timeouts(self, idle: int, leads: bool = True, **timeouts: float) -> None:
        """Set the timeouts of the next attempt after so many idle ones."""
        factor = self.hangs.timeout_factor = timeout_factor(idle)
        if idle <= self.attempt.idle or not leads:
            return
        now = "".join(f", {name} {seconds:g} s" for name, seconds in timeouts.items())
        attempts = "the last attempt" if idle == 1 else f"{idle} attempts in a row"
        log(f"{attempts} committed no step before a timeout: timeouts are {factor:g} times as long now{now}")
        self.journal.event(
            "timeouts_grown", step=self.committed, attempt=self.attempt.number, idle_attempts=idle, factor=factor,
            **timeouts,
        )  # fmt: skip

    def reset_timeouts(self) -> None:
        """Use the job's own timeouts again: this attempt commits steps."""
        self.hangs.timeout_factor = 1.0

    def next(self, ranks: dict[int, int]) -> None:
        """All remaining ranks are back: start the next attempt with these slots."""
        self.grow_timeouts(idle := self.idle_attempts())
        self.take_smaller_plan()
        self.begin(ranks, idle=idle)

    def take_smaller_plan(self) -> None:
        """Use the plan that a rank wrote after it ran out of memory, if only its microbatch is smaller."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            left = Plan.from_json(json.loads(self.run.plan.read_text(encoding="utf-8")))
            if left.axes == self.plan.axes and left.microbatch < self.plan.microbatch:
                self.plan = left

    def begin(
        self,
        ranks: dict[int, int],
        number: int = 0,
        environment: dict[str, str] | None = None,
        how: str = "",
        idle: int = 0,
    ) -> None:
        """Publish the next attempt."""
        number = number or self.attempt.number + 1
        self.committed_before, self.reached_before = self.committed, self.reached
        burst, burst_began = self.burst
        faults = [
            *self.attempt.faults,
            *(entry(f, burst or self.attempt.number) for f in self.open if f.kind not in NOT_RANK_FAULTS),
        ]
        recovered = None
        if self.open:
            fault = self.open[0]
            moved = any(self.attempt.ranks.get(rank) != slot for rank, slot in ranks.items())
            recovered = {
                "fault": _event_kind(fault.kind),
                "how": how or ("spare" if moved else "regroup"),
                "since": self.since,
            }
        remove_failures(self.run)
        for slot in ranks.values():
            if self.board.record(slot).phase == "gone":
                self.board.put(slot, "want", 1)
        deaths = {slot: self.board.get(slot, "deaths") for slot in ranks.values()}
        store = str(self.folder / f"store-{number}")
        self.attempt = Attempt(
            number, self.plan.world, ranks, deaths, store, self.attempt.began, recovered, faults, environment or {},
            idle, burst, burst_began, self.plan.to_json(), self.job.model_dump(mode="json"),
        )  # fmt: skip
        write_attempt(self.folder, self.attempt)
        self.board["attempt"] = number
        self.board["published"] = number
        self.open, self.replaced, self.announced, self.since = [], set(), recovered is None, time.monotonic()
        self.burst = (0, 0.0)
        self.hangs.new_attempt()

    def adopt(self, number: int) -> None:
        """Take over from a supervisor that was lost, of which the manager has written the fault; ranks are not
        affected."""
        self.attempt = read_attempt(self.folder, number)
        self.hangs.timeout_factor = timeout_factor(self.attempt.idle)
        self.journal.event(
            "recovered", fault="supervisor", how="regroup", step=max(r.step for r in self.board.records()) + 1,
            steps_lost=0, attempt=number, seconds=0.0,
        )  # fmt: skip
        log("the supervisor was replaced; no step is lost")

    def settle(self, records: list[Record]) -> None:
        """In normal operation: report that training has resumed, and request missing spares."""
        ranks = [records[slot] for slot in self.attempt.ranks.values()]
        training = all(r.attempt == self.attempt.number and r.phase in TRAINING for r in ranks)
        if training and not self.announced:
            self.announce_recovery(ranks)
        if training and time.monotonic() - self.since > SPARE_DELAY_S and min(r.step for r in ranks) > 0:
            for record in records:
                if not record.want and record.slot not in self.attempt.ranks.values():
                    self.board.put(record.slot, "want", 1)

    def announce_recovery(self, ranks: list[Record]) -> None:
        """Report the step that the attempt resumed at; the ranks may be several steps further by now."""
        self.announced = True
        again = self.attempt.recovered or {}
        step = min(r.resumed for r in ranks)
        seconds = time.monotonic() - again["since"]
        lost = max(0, self.committed_before - step)
        self.journal.event(
            "recovered", fault=again["fault"], how=again["how"], step=step + 1, steps_lost=lost,
            attempt=self.attempt.number, seconds=round(seconds, 3),
        )  # fmt: skip
        self.committed = max([step, *(r.committed for r in ranks)])
        log(f"recovered in {seconds:.1f} s: step {step + 1} is next")

    # -- end

    def ended(self, records: list[Record]) -> int | None:
        """The exit code once the ranks have ended or the run cannot continue."""
        if self.board["end"]:
            return self.board["end"] - 1
        ranks = {rank: records[slot] for rank, slot in self.attempt.ranks.items()}
        gone = {rank: r.code for rank, r in ranks.items() if r.deaths > self.attempt.deaths[r.slot]}
        quiet = [code for code in gone.values() if code in CLEAN_EXITS]
        causes = {rank: read_failure(self.run.logs / f"failure-{rank}.json") for rank in gone}
        final = [rank for rank, cause in causes.items() if cause and not cause["machine"]]
        if not quiet and not final:
            return None
        deadline = time.monotonic() + GRACE_S
        if not quiet:
            self.board["attempt"] = self.attempt.number + 1  # interrupts ranks that wait for an exited one
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            self.beat()
            now = {rank: self.board.record(slot) for rank, slot in self.attempt.ranks.items()}
            gone = {rank: r.code for rank, r in now.items() if r.deaths > self.attempt.deaths[r.slot]}
            if all(rank in gone or r.phase in LEFT_ATTEMPT for rank, r in now.items()):
                break
        if quiet:  # ranks exit together after the last checkpoint; a kill after that changes nothing
            if not self.announced and all(r.attempt == self.attempt.number for r in ranks.values()):
                self.announce_recovery(list(ranks.values()))
            return self.end(max(quiet), [])
        lines: list[str] = []
        codes = [gone.get(rank, 0) for rank in range(self.attempt.world)]
        return self.end(explain_failure(self.run, codes, final[0], [], lines.append), lines)

    def end(self, code: int, lines: list[str]) -> int:
        write_file(self.folder / "end.json", json.dumps(lines))
        self.board["end"] = code + 1
        return code


def _can_join(record: Record, attempt: int) -> bool:
    """Whether the process of a slot in an attempt that is over can join the next one: it has left the attempt, or has
    not joined any."""
    left = record.phase == "waiting" and record.attempt == attempt
    return left or (record.phase == "spare" and record.attempt == 0 and record.pid > 0)


def _event_kind(kind: str) -> str:
    """The name of a kind of fault in events.jsonl: a rank that raised is one that exited."""
    return "exit" if kind == "raised" else kind


def log(text: str) -> None:
    with contextlib.suppress(OSError):
        print(over_block(text), file=sys.stderr, flush=True)


def set_up_process() -> tuple[RunDir, Path, Job, Plan]:
    """Set up the process of a supervisor; returns the run, its folder in shared memory, the job and the plan."""
    die_with_parent()
    set_process_name("weft-supervisor")
    for number in STOP_SIGNALS:  # the manager forwards them to the ranks
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    run, folder = RunDir(Path(sys.argv[1])), Path(sys.argv[2])
    return run, folder, started_job(folder), started_plan(folder)


def main() -> int:
    run, folder, job, plan = set_up_process()
    Supervisor(run, folder, StatusBoard(folder / "board"), job, plan).watch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
