"""A cause that was found, and the registry of causes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.extensions.diagnose.evidence import RunEvidence


@dataclass(frozen=True)
class Finding:
    """One cause, with its evidence and what to do."""

    cause: str
    evidence: str
    fix: str
    rank: int | None = None
    costs_percent: float | None = None
    """Share of the step's time that is lost; None where it is not known, and for failures."""

    def to_json(self) -> dict[str, Any]:
        cost = None if self.costs_percent is None else round(self.costs_percent, 1)
        return {
            "cause": self.cause, "rank": self.rank, "evidence": self.evidence, "fix": self.fix, "costs_percent": cost,
        }  # fmt: skip


Detector = Callable[[RunEvidence], Finding | None]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
