"""`checkpoint`: how often checkpoints are written, where, and how many are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.job.files.store_path import check_url
from weft.job.section import Section, limits


class Checkpoint(Section):
    """How often checkpoints are written, and how many are kept."""

    every: int | Literal["epoch", "never"] = 200
    """Steps between checkpoints, or epoch: after each pass over the training samples. 0 writes only the one of the last
    step. never writes none, for benchmarks and rehearsals: the trained weights are lost when the run ends."""
    keep: int = Field(3, ge=1, le=10**6)
    """Number of checkpoints to keep; older ones are deleted."""
    keep_every: int = Field(0, ge=0, le=10**12)
    """Never delete a checkpoint whose step is a multiple of this; 0 turns this off."""
    to: str | None = None
    """Where checkpoints are written: s3://bucket/prefix, gs://bucket/prefix, file:///folder or a folder; those of the
    run NAME are in TO/NAME/checkpoints. Nodes then need no shared folder. Default: the run folder."""
    background: bool = True
    """Write checkpoints in the background while training continues."""

    @property
    def none(self) -> bool:
        """Whether the run writes no checkpoint."""
        return self.every == "never"

    _check_every = limits("every", valid=lambda n: 0 <= n <= 10**12, must="from 0 to 10^12, epoch, or never")

    @property
    def local(self) -> Checkpoint:
        """The same with checkpoints in the run folder, for runs that a measurement or an experiment makes."""
        return self.model_copy(update={"to": None})

    @field_validator("to")
    @classmethod
    def _store(cls, value: str | None) -> str | None:
        return None if value is None else check_url(value)
