"""Find what is wrong with the ranks of an attempt, from their records, failure files and stacks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.job.files.run_folder import RunDir
from weft.supervisor.attempt import NOT_CONNECTED
from weft.supervisor.failure_report import read_failure
from weft.supervisor.hang_cause import STACK_SIGNAL, FaultReport, blame, main_stack, where
from weft.supervisor.hang_detection import HangDetector
from weft.supervisor.status_board import TRAINING, Record

UNATTRIBUTED_HANG_S = 120.0
"""Timeout of a hang that cannot be attributed to a rank."""
STACK_TIMEOUT_S = 3.0
"""How long a process may take to write its stack: milliseconds, unless the machine is starved."""
POLL_S = 0.02


def read_positions(folder: Path, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Each rank's mesh position and group members, as the ranks wrote them."""
    found = {}
    for rank in ranks:
        with contextlib.suppress(OSError, ValueError):
            found[rank] = json.loads((folder / f"place-{rank}.json").read_text(encoding="utf-8"))
    return found


def exit_fault(run: RunDir, folder: Path, rank: int, record: Record) -> FaultReport:
    """The fault of a rank that has exited."""
    cause = read_failure(run.logs / f"failure-{rank}.json")
    if record.code == NOT_CONNECTED:
        return FaultReport("exit", rank, "did not connect to the other ranks", record.step)
    if cause is not None:
        kind = "oom" if cause["message"].startswith("memory ran out") else "raised"
        why = f"{cause['kind']}: {cause['message']} ({cause['where']})"
        return FaultReport(kind, rank, why, record.step, cause["position"])
    name = signal.Signals(-record.code).name if record.code < 0 else ""
    why = f"was killed by {name}" if name else f"ended with code {record.code} without a failure record"
    return FaultReport("exit", rank, why, record.step, read_positions(folder, [rank]).get(rank, {}).get("position", ""))


def hang_fault(
    folder: Path, ranks: Mapping[int, Record], hangs: HangDetector, seconds: float
) -> tuple[FaultReport | None, set[int]]:
    """Find the rank that caused a standstill and kill it. Returns the fault, if any, and the killed ranks."""
    positions = read_positions(folder, ranks)
    kind, culprits = _culprits(ranks, positions, hangs)
    step = min(record.step for record in ranks.values())
    if not culprits:  # it may resolve itself
        why = "all ranks wait for one another"
        return (FaultReport("hang", None, why, step, "", seconds) if seconds > UNATTRIBUTED_HANG_S else None), set()
    found = stacks(folder, {r: ranks[r].pid for r in culprits if kind != "stopped"})  # which writes none
    for r in culprits:
        kill(ranks[r].pid)
    first = min(culprits)
    stack = found.get(first, [])
    at = where(stack)
    others = "" if len(culprits) == 1 else f" (as do ranks {', '.join(str(r) for r in sorted(culprits)[1:])})"
    why = f"{culprits[first]}{f', at {at}' if at else ''}; the others wait for it{others}"
    position = positions.get(first, {}).get("position", "")
    return FaultReport(kind, first, why, step, position, seconds, "\n".join(stack)), set(culprits)


def data_fault(folder: Path, ranks: Mapping[int, Record]) -> FaultReport | None:
    """The fault of ranks that wait for data while the run is asked to stop: they are killed, and the next attempt saves
    their snapshots. None if no rank waits for data, or without snapshots."""
    waiting = sorted(rank for rank, record in ranks.items() if record.phase == "data")
    if not waiting or not all((folder / f"places-{rank}.json").exists() for rank in ranks):
        return None
    for rank in waiting:
        kill(ranks[rank].pid)
    position = read_positions(folder, waiting).get(waiting[0], {}).get("position", "")
    why = "it waits for data, and the run is asked to stop"
    return FaultReport("hang", waiting[0], why, ranks[waiting[0]].step, position)


def connect_fault(ranks: Mapping[int, Record], hangs: HangDetector) -> FaultReport | None:
    """The fault of ranks that do not get to train while the run is asked to stop: they are killed. None if all train,
    or any that does not is working."""
    waiting = {rank: record for rank, record in ranks.items() if record.phase not in TRAINING}
    if not waiting or not hangs.awaits_nothing(waiting):
        return None
    for record in waiting.values():
        kill(record.pid)
    return FaultReport("hang", None, "they do not connect, and the run is asked to stop", 0)


def _culprits(
    ranks: Mapping[int, Record], positions: Mapping[int, dict[str, Any]], hangs: HangDetector
) -> tuple[str, dict[int, str]]:
    """The kind of a standstill, and a reason for each rank that caused it."""
    if stopped := [r for r in ranks if hangs.stopped(r)]:
        return "stopped", dict.fromkeys(stopped, "it is stopped by a signal")
    if silent := [r for r in ranks if hangs.silent(r)]:
        return "gil", dict.fromkeys(silent, "one of its threads holds the GIL")
    return "hang", _awaited(ranks, positions)


def _awaited(ranks: Mapping[int, Record], positions: Mapping[int, dict[str, Any]]) -> dict[int, str]:
    """The ranks that all others wait for, with the reason of each; empty if they are not known."""
    groups = {rank: positions.get(rank, {}).get("groups", {}) for rank in ranks}
    counts = {r: dict(zip(groups[r], record.counts, strict=False)) for r, record in ranks.items()}
    inside = {r: ["", *groups[r]][record.inside] for r, record in ranks.items()}
    return blame(counts, groups, inside)


def awaited_ranks(folder: Path, ranks: Mapping[int, Record]) -> set[int]:
    """The ranks that all others wait for; empty if they are not known."""
    return set(_awaited(ranks, read_positions(folder, ranks)))


def stacks(folder: Path, pids: Mapping[int, int]) -> dict[int, list[str]]:
    """The Python stack of each process's main thread; empty if it does not respond."""
    files = {rank: folder / f"stack-{pid}" for rank, pid in pids.items()}
    before = {rank: _size(path) for rank, path in files.items()}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    deadline, sizes = time.monotonic() + STACK_TIMEOUT_S, before
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        seen, sizes = sizes, {rank: _size(path) for rank, path in files.items()}
        if all(sizes[r] == seen[r] > before[r] for r in files):  # nothing is written any more
            break
    return {r: main_stack(_tail(files[r], before[r])) for r in files}


def kill(pid: int) -> None:
    """Send SIGKILL, which also ends a stopped process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tail(path: Path, start: int) -> str:
    try:
        return path.read_bytes()[start:].decode("utf-8", "replace")
    except OSError:
        return ""
