"""Claims of attempts: one file for each attempt number in the run's folder, on a disk that all nodes share."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path

from weft.supervisor.nodes.consensus import Decision

_NAME = re.compile(r"(\d{6,})\.json")
LIMIT = 1 << 22


class AttemptClaims:
    """The attempts of a run. Over all nodes, `make` succeeds once for each number."""

    def __init__(self, folder: Path):
        self.folder = folder

    def make(self, decision: Decision) -> bool:
        """Claim an attempt; False if another node has claimed it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.folder / f".draft-{secrets.token_hex(8)}"
        try:
            with draft.open("x", encoding="utf-8") as file:
                json.dump(decision.to_json(), file)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(draft, self.path_of(decision.number))  # atomic, also over NFS
            except FileExistsError:
                # NFS may repeat a call whose answer was lost: then the claim is ours after all
                return os.path.samefile(draft, self.path_of(decision.number))
        finally:
            draft.unlink(missing_ok=True)
        return True

    def read(self, number: int) -> Decision | None:
        """The decision of an attempt, if it has been claimed."""
        try:
            with self.path_of(number).open(encoding="utf-8") as file:
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

    def path_of(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"
