"""Logs faults found by the guards: an event in events.jsonl and a line on the console."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FaultLog:
    """Where faults are logged; `coords` are the mesh coordinates of the ranks."""

    event: Callable[..., None]
    warn: Callable[[str], None]
    coords: Sequence[dict[str, int]]

    def fault(self, fault: str, step: int, why: str, rank: int | None = None, **more: Any) -> None:
        self.warn(why)
        place = "" if rank is None else " ".join(f"{axis}{i}" for axis, i in self.coords[rank].items())
        self.event("fault", fault=fault, rank=rank, position=place, step=step, why=why, detected_after_s=None, **more)

    def recovered(self, fault: str, how: str, step: int, seconds: float = 0.0, **more: Any) -> None:
        self.event("recovered", fault=fault, how=how, step=step, steps_lost=0, seconds=seconds, **more)
