"""`watch`: progress and metrics."""

from __future__ import annotations

from pydantic import Field, field_validator

from weft.job.section import Section


class TracedSteps(Section):
    """Steps of which a trace of all ranks is written to RUN/traces."""

    at: int = Field(100, ge=1, le=10**12)
    """First traced step."""
    steps: int = Field(3, ge=1, le=1000)
    """Number of traced steps."""


class Watch(Section):
    """Progress, metrics and the report."""

    every: int = Field(10, ge=1, le=10**12)
    """Steps between progress lines."""
    gantt_step: int = Field(5, ge=0, le=10**12)
    """Step of a pipelined run whose time line is recorded for the report; 0 turns this off."""
    comm_every: int = Field(10, ge=0, le=10**12)
    """Steps between measurements of communication: its share of the step, how much is not overlapped, its bandwidth. 0
    turns this off."""
    trace: TracedSteps | None = None
    """Steps to trace, such as {at: 100, steps: 3}. The file of all ranks is RUN/traces/steps-100-102.json."""
    nvtx: bool = False
    """Mark the parts of every step as NVTX ranges, for Nsight. Traced steps are marked in any case."""
    power_cap_w: float | None = Field(None, gt=0, le=10_000)
    """Power limit of each GPU during the run, in watts; needs root. The limit that was set before is restored."""
    co2_g_per_kwh: float = Field(473.0, ge=0, le=10_000)
    """Grams of CO2 for a kilowatt-hour where the run is. Default: the world's mean of 2024 (Ember)."""
    trackers: list[str] = Field(default_factory=list)
    """Experiment trackers that receive the metrics; metrics.jsonl is always written."""

    @field_validator("trackers")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        if value:
            raise ValueError(f"no tracker is named {value[0]!r}; metrics.jsonl is always written, so leave this empty")
        return value
