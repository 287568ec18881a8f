"""Discovery of the nodes of a run: each writes its address to a folder of the run."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import Any

from weft.job.errors import MachineError


class NodeRegistry:
    """This node's entry, held by one process at a time, and the entries of the others."""

    def __init__(self, folder: Path, node: int):
        self.folder, self.node = folder, node
        folder.mkdir(parents=True, exist_ok=True)
        self._held = _only_one(folder / f"{node}.lock", node)
        self._before = self._last_end()

    def end(self, code: int) -> None:
        """Record the exit code of the run, for nodes that cannot be reached over the network."""
        self._write("ended", [code, secrets.token_hex(8)])

    def ended(self) -> int | None:
        """The exit code recorded since this node started, if any."""
        last = self._last_end()
        return None if last is None or last == self._before else int(last[0])

    def ended_since(self, claim: Path) -> bool:
        """Whether the run's end was recorded after an attempt was claimed."""
        try:
            return (self.folder / "ended").stat().st_mtime_ns > claim.stat().st_mtime_ns
        except OSError:
            return False

    def _last_end(self) -> list[Any] | None:
        try:
            code, token = json.loads((self.folder / "ended").read_text(encoding="utf-8"))
            return [int(code), str(token)]
        except (OSError, ValueError, TypeError):
            return None

    def enter(self, address: tuple[str, int], incarnation: str) -> None:
        self._write(f"{self.node}.json", {"address": address[0], "port": address[1], "incarnation": incarnation})

    def _write(self, name: str, content: Any) -> None:
        """Write a file atomically, readable only by its owner."""
        draft = self.folder / f".{name}-{secrets.token_hex(4)}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(content, file)
        draft.replace(self.folder / name)

    def others(self) -> list[int]:
        """The nodes that have written an address."""
        names = [path.stem for path in self.folder.glob("*.json") if path.stem.isdigit()]
        return [int(name) for name in names if int(name) != self.node]

    def address_of(self, node: int) -> tuple[str, int] | None:
        try:
            found = json.loads((self.folder / f"{node}.json").read_text(encoding="utf-8"))
            return str(found["address"]), int(found["port"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def leave(self) -> None:
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
