"""`memory`: recompute and offload."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.job.section import Section


class Memory(Section):
    """Where a tensor waits until it is needed."""

    recompute: int | Literal["auto", "none", "selective", "full"] = "auto"
    """What is computed again in the backward pass instead of kept: nothing (none), all but the outputs of matrix
    products and attention (selective), that many blocks (a number), or every block (full). auto is the least that
    fits."""
    budget_gib: float | None = Field(None, gt=0)
    """Memory a rank may use, by which the layout and recompute: auto are chosen. Left out: 90 % of the device's."""
    offload: Literal["none", "activations"] = "none"
    """none keeps everything on the device; activations parks what each block must remember in host memory until its
    backward pass, and computes the rest of the block again but for its attention."""
    chunk: int | Literal["auto"] = "auto"
    """Tokens of a sequence that pass at once through the linear parts of a block (norms, projections, feed-forward),
    which are then computed again chunk by chunk; 0 takes all at once. auto is 0 up to 65,536 tokens a rank."""
    host_gib: float | None = Field(None, ge=0)
    """Host memory that parked activations may take on each rank; what exceeds it stays on the device. Left out: 70 %
    of this machine's, shared by its ranks."""

    @field_validator("chunk")
    @classmethod
    def _tokens(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("must be a number of tokens, 0 for all at once, or auto")
        return value

    @field_validator("recompute")
    @classmethod
    def _count(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("must be a number of blocks from 0 up, or auto, none, selective or full")
        return value
