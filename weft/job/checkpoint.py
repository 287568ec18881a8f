"""`checkpoint`: when the state of the run is written, and how much of it is kept."""

from __future__ import annotations

from pydantic import Field

from weft.job.section import Section


class Checkpoint(Section):
    """When the state of the run is written, and how much of it is kept."""

    every: int = Field(200, ge=0)
    """Steps between checkpoints; 0 writes only the last. The last step is always written."""
    keep: int = Field(3, ge=1)
    """Newest checkpoints kept."""
    keep_every: int = Field(0, ge=0)
    """Checkpoints whose step is a multiple of this are kept for ever; 0 keeps none for ever."""
    background: bool = True
    """Training goes on while a checkpoint is written."""
