"""Where the nodes of a run find each other: a folder of the run in which each leaves its address."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import Any

from weft.job.errors import MachineError


class Registry:
    """One node's entry, which one process at a time may hold, and what the others have left."""

    def __init__(self, folder: Path, node: int):
        self.folder, self.node = folder, node
        folder.mkdir(parents=True, exist_ok=True)
        self._held = _only_one(folder / f"{node}.lock", node)
        self._before = self._last_end()

    def end(self, code: int) -> None:
        """Leave the word that the run is over, for nodes that nobody can tell: their links are cut."""
        self._write("ended", [code, secrets.token_hex(8)])

    def ended(self) -> int | None:
        """The exit code of the others, if the run has ended since this node came."""
        last = self._last_end()
        return None if last is None or last == self._before else int(last[0])

    def _last_end(self) -> list[Any] | None:
        try:
            code, token = json.loads((self.folder / "ended").read_text(encoding="utf-8"))
            return [int(code), str(token)]
        except (OSError, ValueError, TypeError):
            return None

    def enter(self, address: tuple[str, int], birth: str) -> None:
        self._write(f"{self.node}.json", {"address": address[0], "port": address[1], "birth": birth})

    def _write(self, name: str, content: Any) -> None:
        """A file for this owner alone, whole or not at all."""
        draft = self.folder / f".{name}-{secrets.token_hex(4)}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(content, file)
        draft.replace(self.folder / name)

    def others(self) -> list[int]:
        """The nodes that have left an address."""
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
    """A lock that one process of a node holds."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise MachineError(f"node {node} of this run is being run by another process ({path} is locked)") from None
    return handle
