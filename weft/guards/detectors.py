"""Detectors: look at the figures of each step, which are the same on all ranks, and name faults. Extensions register
them, with the kinds of faults that they name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weft.job.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.guards.step_report import RankFigures, StepFigures


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault, as events.jsonl names it."""

    name: str
    help: str
    fatal: bool = False
    """Whether the run ends with exit code 6."""
    alert: str = ""
    """The rule of watch.alerts that tells people; empty if none does."""
    severity: str = "warning"
    """info, warning or critical."""


FAULTS: Registry[FaultKind] = Registry("fault", __name__)

for kind in (
    FaultKind("nan", "loss or gradient norm is not finite", alert="non_finite", severity="critical"),
    FaultKind("spike", "the loss jumped", alert="spike"),
    FaultKind("disk_full", "a checkpoint could not be written", alert="disk", severity="critical"),
    FaultKind("hang", "a collective did not finish", alert="stalled", severity="critical"),
    FaultKind("slow_rank", "a rank computes more slowly than others", alert="slow"),
    FaultKind("slow_link", "an axis communicates more slowly than before", alert="slow"),
    FaultKind("stall", "no data, or a jump of the clock"),
    FaultKind("divergence", "replicas differ, or memory changed between updates"),
    FaultKind("damaged", "a checkpoint is damaged"),
    FaultKind("oom", "a rank ran out of device memory"),
):
    FAULTS.register(kind)


@dataclass(frozen=True)
class DetectedFault:
    """A fault that a detector names."""

    fault: str
    """The name of a FaultKind."""
    why: str
    rank: int | None = None


class Detector(Protocol):
    """Looks at every step. All ranks see the same figures and must come to the same finding."""

    def look(self, step: StepFigures, rows: Sequence[RankFigures]) -> DetectedFault | None: ...


@dataclass(frozen=True)
class DetectorKind:
    """A kind of detector."""

    name: str
    build: str
    """`module:function` of (job, plan, mesh) that returns a Detector."""


DETECTORS: Registry[DetectorKind] = Registry("detector", __name__)
