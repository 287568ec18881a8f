"""What a job with a pinned layout would gain if the planner chose it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.job.errors import FitError, JobError
from weft.job.schema import Job
from weft.planner.calibration import Calibration
from weft.planner.make_plan import best_plan, start_plan
from weft.planner.plan import Plan

MIN_GAIN = 0.05
"""Smallest share of the step time that is worth a line: less is within the error of the estimates."""


@dataclass(frozen=True)
class AutoGain:
    """A faster plan of the same job, with the settings that lead to it."""

    settings: tuple[str, ...]
    layout: str
    step_time_s: float
    pinned_step_time_s: float

    @property
    def share(self) -> float:
        """Share of the pinned step time that is saved."""
        return 1 - self.step_time_s / self.pinned_step_time_s

    def to_json(self) -> dict[str, Any]:
        return {"settings": list(self.settings), "layout": self.layout, "step_time_s": self.step_time_s}

    def __str__(self) -> str:
        return (
            f"{' '.join(self.settings)} would take {self.step_time_s:.3g} s a step instead of "
            f"{self.pinned_step_time_s:.3g} s, by the estimates ({self.layout})"
        )


def auto_gain(job: Job, plan: Plan, calibration: Calibration | None = None) -> AutoGain | None:
    """The faster plan of the settings on auto; None if nothing is pinned, or if it saves less than MIN_GAIN."""
    pinned_time = plan.predicted.get("step_time_s")
    opened, settings = with_auto(job)
    if job.model.module or not settings or not pinned_time:
        return None
    try:
        _, best, _ = best_plan(start_plan(opened, plan.world), calibration)
    except (FitError, JobError):
        return None
    gain = AutoGain(settings, best.layout(), best.predicted.get("step_time_s", pinned_time), pinned_time)
    return gain if gain.share >= MIN_GAIN else None


def with_auto(job: Job) -> tuple[Job, tuple[str, ...]]:
    """The job with layout, recompute and microbatch on auto, and the settings that this changes. A number of
    microbatches (train.accumulation) stays: who writes it wants that many."""
    changes: dict[str, Any] = {}
    settings: list[str] = []
    if job.train.microbatch != "auto" and job.train.accumulation == "auto":
        changes["train"] = job.train.model_copy(update={"microbatch": "auto"})
        settings.append("train.microbatch=auto")
    if job.memory.recompute != "auto":
        changes["memory"] = job.memory.model_copy(update={"recompute": "auto"})
        settings.insert(0, "memory.recompute=auto")
    if job.parallel != "auto":
        changes["parallel"] = "auto"
        settings.insert(0, "parallel=auto")
    return job.model_copy(update=changes), tuple(settings)
