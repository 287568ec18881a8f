"""Attempts, claimed in the run's folder: a file of each number that can be made only once, on a disk that all see."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path

from weft.supervisor.nodes.consensus import Decision

_NAME = re.compile(r"(\d{6,})\.json")
LIMIT = 1 << 22


class Claims:
    """The attempts of a run. `make` succeeds for one caller and one content of a number, on all machines together."""

    def __init__(self, folder: Path):
        self.folder = folder

    def make(self, decision: Decision) -> bool:
        """Claim an attempt; False when someone else has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.folder / f".draft-{secrets.token_hex(8)}"
        try:
            with draft.open("x", encoding="utf-8") as file:
                json.dump(decision.to_json(), file)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(draft, self._path(decision.number))  # appears whole or not at all; also over NFS
            except FileExistsError:
                # the answer of a file server may be lost and the call repeated: then the claim is ours after all
                return os.path.samefile(draft, self._path(decision.number))
        finally:
            draft.unlink(missing_ok=True)
        return True

    def read(self, number: int) -> Decision | None:
        """An attempt, if it has been claimed."""
        try:
            with self._path(number).open(encoding="utf-8") as file:
                return Decision.from_json(json.loads(file.read(LIMIT)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def newest(self) -> int:
        """The number of the last attempt; 0 before the first."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return 0
        return max((int(found[1]) for name in names if (found := _NAME.fullmatch(name))), default=0)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"
