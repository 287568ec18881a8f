"""`watch`: progress and metrics."""

from __future__ import annotations

from pydantic import Field, field_validator

from weft.job.section import Section


class Watch(Section):
    """What a person sees of the run."""

    every: int = Field(10, ge=1)
    """Steps between plain progress lines."""
    gantt_step: int = Field(5, ge=0)
    """The step of a pipelined run whose time line the report shows; 0 records none."""
    comm_every: int = Field(10, ge=0)
    """Steps between those whose communication is timed: its share of the step, what of it nothing hid, its speed. 0
    times none."""
    trackers: list[str] = Field(default_factory=list)
    """Other programs that are told the metrics; metrics.jsonl is always written."""

    @field_validator("trackers")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        if value:
            raise ValueError(f"no tracker is named {value[0]!r}; metrics.jsonl is always written, so leave this empty")
        return value
