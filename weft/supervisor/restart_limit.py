"""When a run has had enough of its faults, and the last words it then says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.job.errors import Exit
from weft.job.run_folder import RunDir
from weft.supervisor.attempt import Attempt
from weft.supervisor.diagnosis import Fault
from weft.supervisor.local_ranks import read_cause, say_why
from weft.supervisor.status_board import Board

AGAIN = {"exit": 3, "raised": 2}
"""As often in a row the same fault at the same step ends the run; 3 for what is not named."""


def hopeless(fault: Fault, earlier: Sequence[list[Any]], restarts: int) -> int:
    """Whether the run has had enough: too many faults, or the same one again and again. Returns the exit code."""
    last, kind = [fault.kind, fault.rank, fault.step], fault.kind
    same = 1
    for before in reversed(earlier):
        if before != last:
            break
        same += 1
    if same < AGAIN.get(kind, 3) and len(earlier) < restarts:
        return 0
    return int(Exit.HANG) if kind in ("hang", "gil", "stopped") else int(Exit.DIFFERS)


def last_words(run: RunDir, board: Board, attempt: Attempt, fault: Fault, code: int) -> tuple[int, list[str]]:
    """What a run that gives up says; its exit code is the failed rank's own, where that left one."""
    lines: list[str] = []
    if fault.rank is not None and read_cause(run.logs / f"failure-{fault.rank}.json"):
        codes = [1] * attempt.world
        code = say_why(run, codes, fault.rank, [], lines.append)
    elif fault.kind == "exit":
        codes = [0] * attempt.world
        codes[fault.rank or 0] = board.get(attempt.ranks[fault.rank or 0], "code")
        code = say_why(run, codes, fault.rank or 0, [], lines.append)
    else:
        log = run.logs / f"rank-{fault.rank or 0}.log"
        lines = [f"{fault.who}: {fault.why}", f"log: {log}; start the same command again to resume"]
    return code, [f"gave up after {len(attempt.faults) + 1} faults, the last at step {fault.step + 1}", *lines]
