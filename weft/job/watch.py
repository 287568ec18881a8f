"""`watch`: progress and metrics."""

from __future__ import annotations

from pydantic import Field, field_validator

from weft.job.section import Section


class Watch(Section):
    """Progress, metrics and the report."""

    every: int = Field(10, ge=1, le=10**12)
    """Steps between progress lines."""
    gantt_step: int = Field(5, ge=0, le=10**12)
    """Step of a pipelined run whose time line is recorded for the report; 0 turns this off."""
    comm_every: int = Field(10, ge=0, le=10**12)
    """Steps between measurements of communication: its share of the step, how much is not overlapped, its bandwidth. 0
    turns this off."""
    trackers: list[str] = Field(default_factory=list)
    """Experiment trackers that receive the metrics; metrics.jsonl is always written."""

    @field_validator("trackers")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        if value:
            raise ValueError(f"no tracker is named {value[0]!r}; metrics.jsonl is always written, so leave this empty")
        return value
