"""One try to train with a certain set of processes: what the supervisor tells them, in a file beside the board."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Attempt:
    """Who is which rank, and where they meet. Its number fences everything: who has another one commits nothing."""

    number: int
    world: int
    """Ranks of the run, on all nodes."""
    ranks: dict[int, int]
    """Rank to slot, of those on this node."""
    deaths: dict[int, int]
    """Of each of these slots, the processes that had ended there before."""
    store: str
    """The file in which they meet, never used by another attempt."""
    began: float
    """When the first attempt began (time.time)."""
    recovered: dict[str, Any] | None = None
    """What went wrong before: fault, how, and when it was seen. None for the first attempt."""
    faults: list[list[Any]] = field(default_factory=list)
    """Kind, rank and step of every fault so far: it tells a fault that comes again and again."""
    environment: dict[str, str] = field(default_factory=dict)
    """More for the ranks' environment, such as an address to meet at."""
    plan: dict[str, Any] = field(default_factory=dict)
    """The layout of this attempt."""

    def rank_of(self, slot: int) -> int | None:
        return next((rank for rank, s in self.ranks.items() if s == slot), None)


def path_of(folder: Path, number: int) -> Path:
    return folder / f"attempt-{number}.json"


def write_attempt(folder: Path, attempt: Attempt) -> None:
    """Whole or not at all: whoever sees the file can read it."""
    path = path_of(folder, attempt.number)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(attempt)), encoding="utf-8")
    os.chmod(temporary, 0o600)
    temporary.replace(path)


def read_attempt(folder: Path, number: int) -> Attempt:
    content = json.loads(path_of(folder, number).read_text(encoding="utf-8"))
    for name in ("ranks", "deaths"):
        content[name] = {int(key): value for key, value in content[name].items()}
    return Attempt(**content)
