"""`checkpoint`: how often checkpoints are written, and how many are kept."""

from __future__ import annotations

from pydantic import Field

from weft.job.section import Section


class Checkpoint(Section):
    """How often checkpoints are written, and how many are kept."""

    every: int = Field(200, ge=0, le=10**12)
    """Steps between checkpoints; 0 writes only the one of the last step, which is always written."""
    keep: int = Field(3, ge=1, le=10**6)
    """Number of checkpoints to keep; older ones are deleted."""
    keep_every: int = Field(0, ge=0, le=10**12)
    """Never delete a checkpoint whose step is a multiple of this; 0 turns this off."""
    background: bool = True
    """Write checkpoints in the background while training continues."""
