"""When a run gives up after repeated faults and what it prints then; how timeouts grow while no step is committed."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Any

from weft.job.errors import Exit
from weft.job.files.run_folder import RunDir
from weft.supervisor.attempt import Attempt
from weft.supervisor.failure_report import explain_failure, read_failure
from weft.supervisor.hang_cause import FaultReport
from weft.supervisor.status_board import StatusBoard

MAX_SAME_FAULT = {"exit": 3, "raised": 2}
"""Attempts in a row that may end with the same cause at the same step, on any rank, by kind; 3 for other kinds."""
MAX_SAME_STEP = 6
"""Attempts in a row that may end at the same step, whatever the cause."""
BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
"""Wait before the third attempt at the same step, doubled with each further one."""
BURST_S = 15.0
"""Ranks that are killed so long after the first of them, many times longer on a slow machine, are one fault."""
KILLED = f"was killed by {signal.SIGKILL.name}"
"""The reason of a fault whose process did not end by itself."""
TIMEOUT_GROWTH, MAX_TIMEOUT_FACTOR = 4.0, 64.0
"""Timeouts are this many times longer after each attempt that ended by a timeout without a new step, up to a limit."""
MAX_NODE_LOST_S = 60.0
"""Upper limit of the grown `resilience.node_lost_s`, unless the job's own is longer."""
STEADY_STEPS = 10
"""New steps after which an attempt uses the job's own timeouts again."""
IDLE_AFTER_PROGRESS = 2
"""Upper limit of the idle attempts after one with some new steps, but fewer than STEADY_STEPS."""
TIMEOUT_FAULTS = ("hang", "gil")
"""Kinds of faults that a timeout detects, which may be too short for this machine."""


def idle_attempts(before: int, new_steps: int, timed_out: bool) -> int:
    """Attempts in a row that ended by a timeout without a new committed step, with the one that has just ended.

    `new_steps` are the steps that it committed beyond those of all earlier attempts.
    """
    if new_steps > 0:
        return 0 if new_steps >= STEADY_STEPS else min(before, IDLE_AFTER_PROGRESS)
    return before + timed_out


def timeout_factor(idle: int) -> float:
    """Multiplier of the timeouts of an attempt, after so many idle ones."""
    return min(MAX_TIMEOUT_FACTOR, TIMEOUT_GROWTH ** min(idle, 10))


def grown_node_lost_s(node_lost_s: float, idle: int) -> float:
    """The heartbeat timeout of a node after so many idle attempts."""
    return min(max(MAX_NODE_LOST_S, node_lost_s), timeout_factor(idle) * node_lost_s)


def cause_of(fault: FaultReport) -> str:
    """What makes two faults the same: the reason without ranks, process ids and addresses."""
    return fault.why if fault.kind == "oom" else f"{fault.kind}: {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', fault.why)}"


def entry(fault: FaultReport, attempt: int) -> list[Any]:
    """A fault as an attempt file keeps it."""
    return [fault.kind, fault.rank, fault.step, cause_of(fault), attempt]


def burst_of(attempt: Attempt, fault: FaultReport | None, now: float, load: float = 1.0) -> tuple[int, float]:
    """The burst of kills that the fault which ended an attempt at `now` belongs to: the attempt that the first kill
    ended, and when. (0, 0.0) for other faults. `load`: how many times slower than usual the machine is."""
    if fault is None or fault.kind != "exit" or fault.why != KILLED:
        return 0, 0.0
    continued = attempt.burst and now - attempt.burst_began < BURST_S * load
    return (attempt.burst, attempt.burst_began) if continued else (attempt.number, now)


def faults_before(earlier: Sequence[list[Any]], burst: int = 0) -> int:
    """How many faults there were before; all those of a burst count once, and those of this burst not at all."""
    return len({before[4] for before in earlier} - {burst})


def repeats(faults: Sequence[FaultReport], earlier: Sequence[list[Any]], burst: int = 0) -> tuple[int, int]:
    """How many attempts in a row, with the current one, ended at the same step, and with the same cause there. All
    attempts of a burst of kills count once."""
    steps, causes = {f.step for f in faults}, {cause_of(f) for f in faults}
    by_attempt: dict[int, list[list[Any]]] = {}
    for before in earlier:
        by_attempt.setdefault(before[4], []).append(before)
    steps |= {f[2] for f in by_attempt.pop(burst, ())}
    same_step = same_cause = 1
    for _, found in sorted(by_attempt.items(), reverse=True):
        if not steps & {f[2] for f in found}:
            break
        if same_cause == same_step and causes & {f[3] for f in found}:
            same_cause += 1
        same_step += 1
    return same_step, same_cause


def give_up_code(faults: Sequence[FaultReport], earlier: Sequence[list[Any]], restarts: int, burst: int = 0) -> int:
    """The exit code if the run must give up (too many faults, or the same one repeatedly), else 0. `burst`: the burst
    of kills that the faults belong to."""
    kind = faults[0].kind
    same_step, same_cause = repeats(faults, earlier, burst)
    few = faults_before(earlier, burst) < restarts
    if same_cause < MAX_SAME_FAULT.get(kind, 3) and same_step < MAX_SAME_STEP and few:
        return 0
    return int(Exit.HANG) if kind in ("hang", "gil", "stopped") else int(Exit.DIFFERS)


def backoff_s(faults: Sequence[FaultReport], earlier: Sequence[list[Any]], idle: int = 0, burst: int = 0) -> float:
    """Seconds to wait before the next attempt, after so many idle ones."""
    repeated = max(repeats(faults, earlier, burst)[0], idle)
    return 0.0 if repeated < 2 else min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (repeated - 2))


def final_lines(
    run: RunDir, board: StatusBoard, attempt: Attempt, fault: FaultReport, code: int, burst: int = 0
) -> tuple[int, list[str]]:
    """The exit code and last lines of a run that gives up; the failed rank's own code where it left one."""
    lines: list[str] = []
    if fault.rank is not None and read_failure(run.logs / f"failure-{fault.rank}.json"):
        codes = [1] * attempt.world
        code = explain_failure(run, codes, fault.rank, [], lines.append)
    elif fault.kind == "exit":
        codes = [0] * attempt.world
        codes[fault.rank or 0] = board.get(attempt.ranks[fault.rank or 0], "code")
        code = explain_failure(run, codes, fault.rank or 0, [], lines.append)
    else:
        log = run.logs / f"rank-{fault.rank or 0}.log"
        lines = [f"{fault.subject}: {fault.why}", f"log: {log}; start the same command again to resume"]
    count = faults_before(attempt.faults, burst) + 1
    return code, [f"gave up after {count} fault{'s' * (count > 1)}, the last at step {fault.step + 1}", *lines]
