"""Claims of attempts: one file for each attempt number, in the run's folder on a shared disk or in its store."""

from __future__ import annotations

import json
import re

from weft.job.files.store_path import AnyPath, create
from weft.supervisor.nodes.consensus import Decision

_NAME = re.compile(r"(\d{6,})\.json")


class AttemptClaims:
    """The attempts of a run. Over all nodes, `make` succeeds once for each number."""

    def __init__(self, folder: AnyPath):
        self.folder = folder

    def make(self, decision: Decision) -> bool:
        """Claim an attempt; False if another node has claimed it."""
        return create(self.path_of(decision.number), json.dumps(decision.to_json()).encode())

    def read(self, number: int) -> Decision | None:
        """The decision of an attempt, if it has been claimed."""
        try:
            return Decision.from_json(json.loads(self.path_of(number).read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def newest(self) -> int:
        """The number of the last attempt; 0 before the first."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return 0
        return max((int(found[1]) for name in names if (found := _NAME.fullmatch(name))), default=0)

    def path_of(self, number: int) -> AnyPath:
        return self.folder / f"{number:06d}.json"
