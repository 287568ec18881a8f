"""Discovery of the nodes of a run: each writes its address to a folder of the run, or of its store."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.job.errors import MachineError
from weft.job.files.store_path import AnyPath, StorePath, replace

STORE_INTERVAL_S = 1.0
"""Seconds between requests to an object store for the same thing."""


class NodeRegistry:
    """This node's entry, held by one process at a time, and the entries of the others."""

    def __init__(self, folder: AnyPath, node: int, locks: Path):
        """`locks`: a folder on this machine's disk."""
        self.folder, self.node, self.locks = folder, node, locks
        self.interval_s = STORE_INTERVAL_S if isinstance(folder, StorePath) else 0.0
        """Shortest time between two requests for the same entry."""
        self._read: dict[str, tuple[float, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        locks.mkdir(parents=True, exist_ok=True)
        self._held = _only_one(locks / f"{node}.lock", node)
        self._before = self._last("ended")
        self._left_before = self._last("left")

    def end(self, code: int, attempt: int, lines: Sequence[str] = ()) -> None:
        """Record the exit code of the run, its last attempt, this node and what it prints, for nodes that cannot be
        reached over the network."""
        content = [code, secrets.token_hex(8), attempt, str(self.node), *lines]
        replace(self.locks / "ended", json.dumps(content).encode())  # a batch script of Slurm reads it here
        self._write("ended", content)

    def ended(self) -> int | None:
        """The exit code recorded since this node started, if any."""
        last = self._last("ended")
        return None if last is None or last == self._before else int(last[0])

    def ended_in(self, attempt: int) -> bool:
        """Whether the run's end was recorded in this attempt or a later one."""
        last = self._last("ended")
        return last is not None and int(last[2]) >= attempt

    def end_of(self, attempt: int) -> tuple[int, int, tuple[str, ...]] | None:
        """The node that ended the run in this attempt, since this one started, its exit code and what it printed."""
        last = self._last("ended")
        if last is None or last == self._before or last[2] != attempt or len(last) < 4 or not last[3].isdecimal():
            return None
        return int(last[3]), last[0], tuple(last[4:])

    def leave_gathering(self, code: int) -> None:
        """Record that this node ends before the first attempt: those that wait for it need not wait any longer."""
        self._write("left", [code, secrets.token_hex(8), self.node])

    def left(self) -> tuple[int, int] | None:
        """Another node that ended before the first attempt, since this one started, and its exit code."""
        last = self._last("left")
        return None if last is None or last == self._left_before else (int(last[2]), int(last[0]))

    def _last(self, name: str) -> list[Any] | None:
        """An exit code, a token that differs each time, the attempt or node that it belongs to, and other words."""
        found = self._content(name)
        try:
            code, token, number, *words = found
            return [int(code), str(token), int(number), *map(str, words)]
        except (ValueError, TypeError):
            return None

    def _content(self, name: str) -> Any:
        """An entry's content; from a store, what was read in the last interval_s. None if there is none."""
        read_at, content = self._read.get(name, (-self.interval_s, None))
        if (now := time.monotonic()) - read_at >= self.interval_s:
            try:
                content = json.loads((self.folder / name).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                content = None
            self._read[name] = now, content
        return content

    def enter(self, address: tuple[str, int], incarnation: str) -> None:
        self._write(f"{self.node}.json", {"address": address[0], "port": address[1], "incarnation": incarnation})

    def _write(self, name: str, content: Any) -> None:
        replace(self.folder / name, json.dumps(content).encode())

    def others(self) -> list[int]:
        """The nodes that have written an address."""
        names = [p.stem for p in self.folder.iterdir() if p.name.endswith(".json") and p.stem.isdigit()]
        return [int(name) for name in names if int(name) != self.node]

    def address_of(self, node: int) -> tuple[str, int] | None:
        found = self._content(f"{node}.json")
        try:
            return str(found["address"]), int(found["port"])
        except (ValueError, KeyError, TypeError):
            return None

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / f"{self.node}.json").unlink(missing_ok=True)
        os.close(self._held)


def _only_one(path: Path, node: int) -> int:
    """Take the lock that one process of a node may hold."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise MachineError(f"node {node} of this run is being run by another process ({path} is locked)") from None
    return handle
