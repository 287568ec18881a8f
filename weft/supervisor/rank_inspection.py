"""What is wrong with the ranks of an attempt: asked of their records, of what they left behind, and of their stacks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.job.run_folder import RunDir
from weft.supervisor.diagnosis import STACK, Fault, blame, main_stack, where
from weft.supervisor.hang_timeout import Patience
from weft.supervisor.local_ranks import read_cause
from weft.supervisor.status_board import Record

NOBODY_S = 120.0
"""A standstill for which nobody is to blame is a fault only after this time."""
STACK_S = 0.3
"""How long a process may take to write down its stack."""
LOOK_S = 0.02


def places(folder: Path, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Each rank's position, and the members of its groups by axis, as the ranks wrote them down."""
    found = {}
    for rank in ranks:
        with contextlib.suppress(OSError, ValueError):
            found[rank] = json.loads((folder / f"place-{rank}.json").read_text(encoding="utf-8"))
    return found


def exited(run: RunDir, folder: Path, rank: int, record: Record) -> Fault:
    """Why a rank is gone."""
    cause = read_cause(run.logs / f"failure-{rank}.json")
    if cause is not None:
        kind = "oom" if cause["message"].startswith("memory ran out") else "raised"
        why = f"{cause['kind']}: {cause['message']} ({cause['where']})"
        return Fault(kind, rank, why, record.step, cause["position"])
    name = signal.Signals(-record.code).name if record.code < 0 else ""
    why = f"was killed by {name}" if name else f"ended with code {record.code} and left no reason"
    return Fault("exit", rank, why, record.step, places(folder, [rank]).get(rank, {}).get("position", ""))


def stuck(
    folder: Path, ranks: Mapping[int, Record], patience: Patience, seconds: float
) -> tuple[Fault | None, set[int]]:
    """Nothing has moved for so long: find out who is to blame, and end it. Returns also whom it has killed."""
    stands = places(folder, ranks)
    kind, guilty = _guilty(ranks, stands, patience)
    step = min(record.step for record in ranks.values())
    if not guilty:  # perhaps it mends itself
        why = "all ranks wait for one another"
        return (Fault("hang", None, why, step, "", seconds) if seconds > NOBODY_S else None), set()
    found = stacks(folder, {r: ranks[r].pid for r in guilty})
    for r in guilty:
        kill(ranks[r].pid)
    first = min(guilty)
    at = where(found[first])
    others = "" if len(guilty) == 1 else f" (as do ranks {', '.join(str(r) for r in sorted(guilty)[1:])})"
    why = f"{guilty[first]}{f', at {at}' if at else ''}; the others wait for it{others}"
    position = stands.get(first, {}).get("position", "")
    return Fault(kind, first, why, step, position, seconds, "\n".join(found[first])), set(guilty)


def _guilty(
    ranks: Mapping[int, Record], stands: Mapping[int, dict[str, Any]], patience: Patience
) -> tuple[str, dict[int, str]]:
    """The kind of a standstill, and for each rank that is to blame what it does or does not do."""
    if stopped := [r for r in ranks if patience.stopped(r)]:
        return "stopped", dict.fromkeys(stopped, "it is stopped by a signal")
    if silent := [r for r in ranks if patience.silent(r)]:
        return "gil", dict.fromkeys(silent, "one of its threads holds Python's lock and does not let go")
    groups = {rank: stands.get(rank, {}).get("groups", {}) for rank in ranks}
    counts = {r: dict(zip(groups[r], record.counts, strict=False)) for r, record in ranks.items()}
    inside = {r: ["", *groups[r]][record.inside] for r, record in ranks.items()}
    return "hang", blame(counts, groups, inside)


def stacks(folder: Path, pids: Mapping[int, int]) -> dict[int, list[str]]:
    """The Python stack of each process's main thread; empty where it cannot answer."""
    files = {rank: folder / f"stack-{pid}" for rank, pid in pids.items()}
    before = {rank: _size(path) for rank, path in files.items()}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK)
    deadline = time.monotonic() + STACK_S
    while time.monotonic() < deadline and any(_size(files[r]) == before[r] for r in files):
        time.sleep(LOOK_S)
    time.sleep(LOOK_S)
    return {r: main_stack(_tail(files[r], before[r])) for r in files}


def kill(pid: int) -> None:
    """Also a stopped process can be killed."""
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
