"""Read files below a folder that others can write to: links are not followed, and only regular files are opened."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 1 << 20
"""Longer lines are skipped."""
MAX_JSON_BYTES = 16 << 20
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def open_inside(folder: Path, *parts: str) -> Iterator[int | None]:
    """A file descriptor of folder/parts, or None if it is missing, not a regular file, or reached through a link."""
    handles: list[int] = []
    try:
        try:
            handles.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for part in parts[:-1]:
                handles.append(os.open(part, READ_FLAGS | os.O_DIRECTORY, dir_fd=handles[-1]))
            handles.append(os.open(parts[-1], READ_FLAGS, dir_fd=handles[-1]))
            regular = stat.S_ISREG(os.fstat(handles[-1]).st_mode)
        except (OSError, ValueError):
            regular = False
        yield handles[-1] if regular else None
    finally:
        for handle in handles:
            os.close(handle)


def read_inside(folder: Path, *parts: str, limit: int = MAX_JSON_BYTES) -> bytes:
    """The content of a file; empty if it cannot be read or is larger than the limit."""
    with open_inside(folder, *parts) as handle:
        if handle is None or os.fstat(handle).st_size > limit:
            return b""
        try:
            return os.pread(handle, limit, 0)
        except OSError:
            return b""


def read_json(folder: Path, *parts: str) -> dict[str, Any]:
    """A JSON object; empty if the file holds anything else."""
    return parse_object(read_inside(folder, *parts)) or {}


def parse_object(line: bytes) -> dict[str, Any] | None:
    """A line as a JSON object without NaN and infinities, or None."""
    if len(line) > MAX_JSON_BYTES:
        return None
    try:
        value = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def signature(folder: Path, *parts: str) -> tuple[int, int, int]:
    """Identity, size and time of change of a file; zeros if it is missing. Equal signatures mean equal content."""
    try:
        found = os.stat(folder.joinpath(*parts), follow_symlinks=False)
    except (OSError, ValueError):
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def last_lines(folder: Path, *parts: str, size: int = 1 << 16) -> list[bytes]:
    """The complete lines in the last `size` bytes of a file."""
    with open_inside(folder, *parts) as handle:
        if handle is None:
            return []
        end = os.fstat(handle).st_size
        start = max(0, end - size)
        lines = os.pread(handle, size, start).split(b"\n")
        return lines[1 if start else 0 : -1]
