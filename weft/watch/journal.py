"""metrics.jsonl and events.jsonl: append lines, and read them back after a crash."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weft.job.files.run_folder import RunDir

MAX_PENDING_LINES = 10_000
"""Lines kept in memory while the disk accepts none."""


class Journal:
    """Appends to a run's metrics and events; a killed process leaves at most one incomplete last line.

    A full disk does not end the run: lines are kept in memory and written when the disk accepts them again.
    """

    def __init__(self, run: RunDir) -> None:
        run.path.mkdir(parents=True, exist_ok=True)
        self._metrics = _Lines(run.metrics)
        self._events = _Lines(run.events)

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Append the record of a step."""
        self._metrics.append(record)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append an event with the current time."""
        self._events.append({"time": datetime.now(UTC).isoformat(), "event": kind, **fields})

    def close(self) -> None:
        self._metrics.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


NUMBERS = frozenset({
    "step", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "mfu", "peak_memory_gib", "val_loss",
    "seconds", "steps_done",
})  # fmt: skip
"""Fields of metrics and events that must be numbers; a damaged line may hold anything."""


def record_early_stop(run: RunDir, code: int) -> None:
    """Record that a run was stopped before this start did a step."""
    step = max((int(record["step"]) for record in read_metrics(run.metrics)), default=0)
    with Journal(run) as journal:
        journal.event("stop", step=step, steps_done=0, code=code)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every complete line that is a JSON object, without fields of NUMBERS that hold something else. Other lines are
    skipped; a missing or unreadable file is empty."""
    try:
        lines = Path(path).read_bytes().split(b"\n") if Path(path).is_file() else []  # a named pipe would block
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            value = json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append({key: v for key, v in value.items() if key not in NUMBERS or _is_number(v)})
    return found


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps in order; of a step that was repeated after a resume, the last record."""
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_jsonl(path):
        step = record.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            by_step[step] = record
    return [by_step[step] for step in sorted(by_step)]


def to_plain(value: Any) -> Any:
    """Convert a value to strict JSON: non-finite numbers become null, unknown types become text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(v) for v in value]
    # numpy and torch values, without importing either
    tolist = getattr(value, "tolist", None)
    return to_plain(tolist()) if callable(tolist) else str(value)


class _Lines:
    """An append-only file of whole lines."""

    def __init__(self, path: Path) -> None:
        self._late: deque[bytes] = deque(maxlen=MAX_PENDING_LINES)
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        size = os.fstat(self._fd).st_size
        self._torn = False
        if size:
            os.lseek(self._fd, size - 1, os.SEEK_SET)
            self._torn = os.read(self._fd, 1) != b"\n"

    def append(self, record: Mapping[str, Any]) -> None:
        """Write the line in one system call, so that no buffer is lost and lines of several threads do not mix."""
        line = (json.dumps(to_plain(record), allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        with self._lock, contextlib.suppress(OSError):  # disk full: tried again with the next line
            self._late.append(line)
            self._write_late()

    def _write_late(self) -> None:
        while self._late:
            self._write(self._late[0])
            self._late.popleft()

    def _write(self, line: bytes) -> None:
        if self._torn:
            line = b"\n" + line
        self._torn = True
        while line:
            line = line[os.write(self._fd, line) :]
        self._torn = False

    def close(self) -> None:
        if self._fd >= 0:
            with self._lock, contextlib.suppress(OSError):
                self._write_late()
            os.close(self._fd)
            self._fd = -1
