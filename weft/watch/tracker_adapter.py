"""What a tracker's adapter is given and must do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass
class TrackedRun:
    """A run, for its adapters."""

    name: str
    folder: Path
    job: dict[str, Any]
    """The job as resolved, without secrets."""
    plan: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)
    """Kept between starts of the run, such as the tracker's own id of it."""


@dataclass(frozen=True)
class TrackedStep:
    """The numbers of a step by name."""

    step: int
    wall_time: float
    values: dict[str, float]


class TrackerAdapter(Protocol):
    """One tracker of one run. Its process is not the training's: it may wait, and it may raise."""

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, steps: list[TrackedStep]) -> None:
        """Add steps, each once and in order."""

    def event(self, kind: str, text: str, step: int | None, bad: bool) -> None:
        """Add an event; a bad one as an alert where the tracker has them."""

    def finish(self, status: str, report: Path | None) -> None:
        """End of this start of the run: `status` is done, stopped or failed."""


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested data by dotted name."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            found |= flat(inner, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = inner
    return found
