"""The last lines of a failed run, from its ranks' exit codes and failure records."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.job.errors import Exit
from weft.job.files.run_folder import RunDir
from weft.supervisor.memory_folder import write_file
from weft.watch.journal import Journal, read_jsonl
from weft.watch.run_tail import LineTail

LAST_RECORDS_BYTES = 1 << 16
ENDS = ("done", "stop", "diverged", "failed")
"""Events that end a run."""


def explain_failure(run: RunDir, codes: list[int], first: int, silent: list[int], log: Callable[[str], None]) -> int:
    """Print which rank failed, its position, what it was doing and what to try. Returns the exit code.

    `silent` are the ranks that the launcher killed because they did not exit.
    """
    names = sorted({path.name for path in _records(run.logs)})
    causes = [cause for name in names if (cause := read_failure(run.logs / name))]
    silent = [i for i in silent if not has_failure_record(run, i)]
    killed = [i for i, c in enumerate(codes) if c < 0 and not has_failure_record(run, i)]
    first_hand = sorted((c for c in causes if not c["echo"]), key=lambda c: c["time"])
    timeouts_only = first_hand and all(c["code"] == Exit.HANG for c in first_hand)
    if timeouts_only and silent and set(killed) <= set(silent):
        return _explain_silent(run, first_hand[0], silent, log)
    if killed and (not first_hand or timeouts_only or first in killed):
        rank = first if first in killed else killed[0]
        name = signal.Signals(-codes[rank]).name
        hint = "; if nobody sent it, memory may have run out: see dmesg, and try a smaller train.microbatch"
        log(f"rank {rank} was killed by {name}{hint if name == 'SIGKILL' else ''}")
        log(f"log: {_log_path(run, rank)}; start the same command again to resume")
        return int(Exit.DIFFERS)
    known = first_hand or sorted(causes, key=lambda c: c["time"])
    if not known:
        log(f"rank {first} ended with code {codes[first]} without a failure record; log: {_log_path(run, first)}")
        return int(Exit.DIFFERS)
    cause = known[0]
    if cause["expected"]:
        log(f"weft: {cause['message']}")
        return int(cause["code"])
    log(f"{_rank_name(cause)} failed in {cause['where']}: {cause['kind']}: {cause['message']}")
    again = (
        "start the same command again to resume" if cause["machine"] else "once it is mended, the same command resumes"
    )
    log(f"traceback: {_log_path(run, cause['rank'])}; {again}")
    return int(cause["code"])


def keep_lines(log: Callable[[str], None], lines: list[str]) -> Callable[[str], None]:
    """A log function that also appends to `lines`."""

    def keep(text: str) -> None:
        lines.append(text)
        log(text)

    return keep


def has_end(run: RunDir) -> bool:
    """Whether the events of a run after its last start say how it ended."""
    names = [event.get("event") for event in read_jsonl(run.events)]
    last_start = max((i for i, name in enumerate(names) if name == "start"), default=0)
    return any(name in ENDS for name in names[last_start:])


def record_failure(run: RunDir, code: int, lines: list[str]) -> None:
    """Write the event `failed` after the last lines of a run that ended with an error; a diverged run has its own."""
    if code in (Exit.DONE, Exit.PREEMPTED, Exit.INTERRUPTED, Exit.DIVERGED) or code < 0 or not run.path.is_dir():
        return
    sentences = [line for line in lines if not line.startswith(("log: ", "traceback: "))]
    why = sentences[-1].removeprefix("weft: ") if sentences else f"the run ended with code {code}"
    with Journal(run) as journal:
        size = run.metrics.stat().st_size
        last = LineTail(run.metrics, max(0, size - LAST_RECORDS_BYTES)).read()[-1:]
        journal.event("failed", step=last[0].get("step") if last else 0, code=code, why=why)


def _explain_silent(run: RunDir, waiter: dict[str, Any], silent: list[int], log: Callable[[str], None]) -> int:
    names = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
    log(
        f"{names} did not respond; {_rank_name(waiter)} waited in {waiter['where']}: {waiter['kind']}: "
        f"{waiter['message']}"
    )
    log(
        f"log: {_log_path(run, silent[0])}; start the same command again to resume, with a longer comm.timeout_s if it "
        "was only slow"
    )
    return int(Exit.HANG)


def write_failure(run: RunDir, rank: int, cause: dict[str, Any]) -> None:
    """Write a rank's failure record, also into the memory folder of a supervised run: the disk may accept none, and
    other nodes may remove it before this one has read it."""
    path, text = run.logs / f"failure-{rank}.json", json.dumps(cause)
    for folder in _memory_folder():
        with contextlib.suppress(OSError):
            write_file(folder / path.name, text)
    with contextlib.suppress(OSError):
        path.write_text(text, encoding="utf-8")


def read_failure(path: Path) -> dict[str, Any] | None:
    """A rank's failure record by its path in the logs; None if it is missing or unreadable."""
    for file in (path, *(folder / path.name for folder in _memory_folder())):
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return found
    return None


def remove_failure(run: RunDir, rank: int) -> None:
    """Remove a rank's failure record."""
    for folder in (run.logs, *_memory_folder()):
        (folder / f"failure-{rank}.json").unlink(missing_ok=True)


def remove_failures(run: RunDir) -> None:
    """Remove the failure records of an earlier attempt."""
    for path in _records(run.logs):
        path.unlink(missing_ok=True)


def _records(logs: Path) -> list[Path]:
    return [path for folder in (logs, *_memory_folder()) for path in folder.glob("failure-*.json")]


def _memory_folder() -> list[Path]:
    """The memory folder of the supervised run that this process belongs to."""
    return [Path(os.environ["WEFT_MEMORY"])] if "WEFT_MEMORY" in os.environ else []


def _rank_name(cause: dict[str, Any]) -> str:
    return f"rank {cause['rank']} ({cause['position']})" if cause["position"] else f"rank {cause['rank']}"


def has_failure_record(run: RunDir, rank: int) -> bool:
    return read_failure(run.logs / f"failure-{rank}.json") is not None


def _log_path(run: RunDir, rank: int) -> Path:
    return run.logs / f"rank-{rank}.log"
