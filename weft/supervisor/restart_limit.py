"""When a run gives up after repeated faults, and what it prints then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.job.errors import Exit
from weft.job.run_folder import RunDir
from weft.supervisor.attempt import Attempt
from weft.supervisor.diagnosis import FaultReport
from weft.supervisor.failure_report import explain_failure, read_failure
from weft.supervisor.status_board import StatusBoard

MAX_SAME_FAULT = {"exit": 3, "raised": 2}
"""How often in a row the same fault at the same step may happen, by kind; 3 for other kinds."""


def give_up_code(fault: FaultReport, earlier: Sequence[list[Any]], restarts: int) -> int:
    """The exit code if the run must give up (too many faults, or the same one repeatedly), else 0."""
    last, kind = [fault.kind, fault.rank, fault.step], fault.kind
    same = 1
    for before in reversed(earlier):
        if before != last:
            break
        same += 1
    if same < MAX_SAME_FAULT.get(kind, 3) and len(earlier) < restarts:
        return 0
    return int(Exit.HANG) if kind in ("hang", "gil", "stopped") else int(Exit.DIFFERS)


def final_lines(
    run: RunDir, board: StatusBoard, attempt: Attempt, fault: FaultReport, code: int
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
        lines = [f"{fault.who}: {fault.why}", f"log: {log}; start the same command again to resume"]
    return code, [f"gave up after {len(attempt.faults) + 1} faults, the last at step {fault.step + 1}", *lines]
