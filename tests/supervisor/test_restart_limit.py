"""A run gives up when the same cause ends attempts at the same step, whichever rank is blamed first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.command import python, write_job
from helpers.parity import make_job

from weft.job.errors import Exit
from weft.job.files.run_folder import RunDir
from weft.planner import make_plan
from weft.supervisor.attempt import BEGAN, Attempt
from weft.supervisor.hang_cause import FaultReport
from weft.supervisor.restart_limit import (
    BURST_S,
    IDLE_AFTER_PROGRESS,
    KILLED,
    MAX_BACKOFF_S,
    MAX_NODE_LOST_S,
    MAX_SAME_FAULT,
    MAX_SAME_STEP,
    MAX_TIMEOUT_FACTOR,
    STEADY_STEPS,
    backoff_s,
    burst_of,
    entry,
    faults_before,
    give_up_code,
    grown_node_lost_s,
    idle_attempts,
    repeats,
    timeout_factor,
)
from weft.supervisor.status_board import StatusBoard
from weft.supervisor.supervisor import MAX_UNCONNECTED, Supervisor


def fault(rank: int, why: str, step: int = 0, kind: str = "raised") -> FaultReport:
    return FaultReport(kind, rank, why, step)


def after(*attempts: list[FaultReport]) -> list[list[Any]]:
    return [entry(f, number + 1) for number, faults in enumerate(attempts) for f in faults]


def test_same_cause_on_another_rank_is_the_same_fault() -> None:
    first, second = (
        fault(0, "OSError: Too many open files: '/proc/17/stat'"),
        fault(1, "OSError: Too many open files: '/proc/9/stat'"),
    )
    assert repeats([second], after([first])) == (2, 2)
    assert give_up_code([second], after([first]), 100) == Exit.DIFFERS
    assert give_up_code([second], [], 100) == 0
    assert give_up_code([fault(1, "ValueError: x")], after([first]), 100) == 0
    assert give_up_code([fault(1, second.why, step=5)], after([first]), 100) == 0


def test_attempts_without_progress_end_the_run_and_back_off() -> None:
    earlier: list[list[Any]] = []
    waits = []
    for number in range(1, 100):
        now = [fault(number % 3, f"cause {'x' * number}", kind="exit")]
        if give_up_code(now, earlier, 100):
            break
        waits.append(backoff_s(now, earlier))
        earlier += [entry(f, number) for f in now]
    assert number == MAX_SAME_STEP
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert max(waits) <= MAX_BACKOFF_S


def test_kills_at_different_steps_do_not_add_up() -> None:
    earlier: list[list[Any]] = []
    for number in range(1, 90):
        now = [fault(0, "was killed by SIGKILL", step=number, kind="exit")]
        assert give_up_code(now, earlier, 100) == 0
        assert backoff_s(now, earlier) == 0.0
        earlier += [entry(f, number) for f in now]
    again = [entry(now[0], number + i) for i in range(1, MAX_SAME_FAULT["exit"])]
    assert give_up_code(now, earlier + again, 100) == Exit.DIFFERS


def test_kills_of_a_burst_are_one_fault() -> None:
    earlier: list[list[Any]] = []
    began, before = 0.0, Attempt(1, 2, {}, {}, "", 0.0)
    for number in range(1, 7):
        now = [fault(number % 2, KILLED, step=18, kind="exit")]
        burst, began = burst_of(before, now[0], now=100.0 + number)
        assert (burst, began) == (1, 101.0)
        assert give_up_code(now, earlier, 1, burst) == 0
        assert backoff_s(now, earlier, burst=burst) == 0.0
        earlier += [entry(f, burst) for f in now]
        before = Attempt(number + 1, 2, {}, {}, "", 0.0, burst=burst, burst_began=began)
    assert faults_before(earlier) == 1
    assert burst_of(before, fault(0, "SIGSEGV", kind="exit"), 107.0) == (0, 0.0), "not from outside"
    burst, _ = burst_of(before, now[0], began + BURST_S + 1)
    assert burst == before.number and repeats(now, earlier, burst) == (2, 2)
    assert give_up_code(now, earlier, 1, burst) == Exit.DIFFERS, "one fault before, and one restart allowed"


def test_run_that_is_asked_to_stop_ends_if_its_ranks_do_not_connect(tmp_path: Path) -> None:
    run, board = RunDir(tmp_path / "run"), StatusBoard(tmp_path / "board", slots=2)
    (tmp_path / BEGAN).write_text("0.0")
    supervisor = Supervisor(run, tmp_path, board, *make_plan(make_job(parallel={"dp_shard": 2})))
    supervisor.first()
    board["stop"] = int(Exit.PREEMPTED)
    for attempt in range(1, MAX_UNCONNECTED + 1):
        assert (board["published"], board["end"]) == (attempt, 0)
        supervisor.unconnected += 1
        supervisor.replaced = {0, 1}
        supervisor.broken(FaultReport("hang", None, "they do not connect, and the run is asked to stop", 0))
        for slot in range(2):
            board.put(slot, "deaths", attempt)
        supervisor.regroup(board.records())
    assert board["end"] == Exit.PREEMPTED + 1
    assert json.loads((tmp_path / "end.json").read_text()) == [
        "stopped without saving, since the ranks did not connect in 2 attempts; the same command resumes from the last "
        "checkpoint"
    ]


def test_timeouts_grow_while_attempts_end_by_a_timeout_without_a_step() -> None:
    idle, lost_s, waits = 0, [], []
    for _ in range(MAX_SAME_STEP):
        lost_s.append(grown_node_lost_s(2.4, idle))
        idle = idle_attempts(idle, 0, timed_out=True)
        waits.append(backoff_s([fault(0, "node 1 is silent", kind="elsewhere")], [], idle))
    assert lost_s == [2.4, 9.6, 38.4, MAX_NODE_LOST_S, MAX_NODE_LOST_S, MAX_NODE_LOST_S]
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert idle == MAX_SAME_STEP, "the run ends"
    assert timeout_factor(10**6) == MAX_TIMEOUT_FACTOR
    assert grown_node_lost_s(90.0, 3) == 90.0, "the job's own is longer than the limit"
    assert idle_attempts(idle, 0, timed_out=False) == idle, "a rank's own fault neither adds nor resets"
    assert idle_attempts(idle, 1, timed_out=True) == IDLE_AFTER_PROGRESS
    assert idle_attempts(idle, STEADY_STEPS, timed_out=True) == 0
    assert timeout_factor(0) == 1.0


def test_too_low_limit_of_open_files_is_refused(tmp_path: Any) -> None:
    write_job(tmp_path, train={"steps": 3, "global_batch": 4}, cluster={"device": "cpu"})
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (24, int(sys.argv.pop(1)))); "
        "sys.argv[0] = 'weft'; from weft.__main__ import main; main()"
    )
    result = python(tmp_path, "-c", script, "24", "train", "job.yaml", "--nproc", "2")
    assert result.code == Exit.MACHINE
    assert result.last == (
        "weft: a process may open 24 files here, and a run of 2 ranks needs 72; raise it with `ulimit -n 1024`, or in "
        "/etc/security/limits.conf"
    )
    assert not (tmp_path / "runs").exists()
    assert python(tmp_path, "-c", script, "4096", "train", "job.yaml", "--nproc", "2").code == 0
