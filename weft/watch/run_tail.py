"""Reads the lines that are appended to a run's metrics and events, by byte offset."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MAX_READ_BYTES = 4 << 20
MAX_LINE_BYTES = 4 << 20
"""Longer lines are skipped."""


class LineTail:
    """The complete lines of a growing file of JSON objects, each once."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def read(self) -> list[dict[str, Any]]:
        """Objects appended since the last call, at most MAX_READ_BYTES of them. Other lines are skipped."""
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.offset:
                    self.offset = 0  # another file
                file.seek(self.offset)
                data = file.read(MAX_READ_BYTES)
        except OSError:
            return []
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) >= MAX_LINE_BYTES:
            cut = len(data)
        self.offset += cut
        found = []
        for line in data[:cut].splitlines():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                found.append(value)
        return found
