"""`checkpoint`: how often checkpoints are written, where, and how many are kept."""

from __future__ import annotations

from pydantic import Field, field_validator

from weft.job.files.store_path import check_url
from weft.job.section import Section


class Checkpoint(Section):
    """How often checkpoints are written, and how many are kept."""

    every: int = Field(200, ge=0, le=10**12)
    """Steps between checkpoints; 0 writes only the one of the last step, which is always written."""
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
    def local(self) -> Checkpoint:
        """The same with checkpoints in the run folder, for runs that a measurement or an experiment makes."""
        return self.model_copy(update={"to": None})

    @field_validator("to")
    @classmethod
    def _store(cls, value: str | None) -> str | None:
        return None if value is None else check_url(value)
