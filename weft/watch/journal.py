"""The journal of a run: metrics.jsonl and events.jsonl, appended line by line and read back after any kill."""

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

from weft.job.run_folder import RunDir

LATE = 10_000
"""Lines that are kept while the disk takes none."""


class Journal:
    """Appends to a run's metrics and events; a kill leaves at most one torn last line.

    A disk that refuses does not end a run: what it would not take is written when it takes lines again.
    """

    def __init__(self, run: RunDir) -> None:
        run.path.mkdir(parents=True, exist_ok=True)
        self._metrics = _Lines(run.metrics)
        self._events = _Lines(run.events)

    def metrics(self, record: Mapping[str, Any]) -> None:
        """One step's figures."""
        self._metrics.append(record)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Something that happened, and when."""
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


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every whole line that holds an object; torn and foreign lines are passed over, a missing file is empty."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            value = json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps in order; of a step that a resumed run repeated, the last telling."""
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_jsonl(path):
        step = record.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            by_step[step] = record
    return [by_step[step] for step in sorted(by_step)]


def to_plain(value: Any) -> Any:
    """A value as strict JSON can hold it: what is not finite becomes null, what is foreign becomes text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(v) for v in value]
    # numpy's scalars and arrays, and torch's tensors, know their plain form without being imported here
    tolist = getattr(value, "tolist", None)
    return to_plain(tolist()) if callable(tolist) else str(value)


class _Lines:
    """A file that only ever grows by whole lines."""

    def __init__(self, path: Path) -> None:
        self._late: deque[bytes] = deque(maxlen=LATE)
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        size = os.fstat(self._fd).st_size
        self._torn = False
        if size:
            os.lseek(self._fd, size - 1, os.SEEK_SET)
            self._torn = os.read(self._fd, 1) != b"\n"

    def append(self, record: Mapping[str, Any]) -> None:
        """Hand the whole line to the system in one call: no buffer to lose, and no thread can write into it."""
        line = (json.dumps(to_plain(record), allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        with self._lock, contextlib.suppress(OSError):  # a full disk; it is tried again with the next line
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
