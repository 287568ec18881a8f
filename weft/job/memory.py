"""`memory`: recompute, offload and chunks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.job.section import Section, limits


class Memory(Section):
    """How activations are saved for the backward pass."""

    recompute: int | Literal["auto", "none", "selective", "full"] = "auto"
    """What is recomputed in the backward pass instead of saved: nothing (none), everything except the outputs of matrix
    products and attention (selective), a number of whole blocks, or every block (full). auto recomputes the least that
    fits into memory."""
    budget_gib: float | None = Field(None, gt=0)
    """Memory budget of a rank, from which the layout and recompute: auto are chosen. Default: 90 % of the device's
    memory."""
    offload: Literal["none", "activations"] = "none"
    """none keeps activations on the device; activations moves the saved inputs and attention outputs of each block to
    host memory until its backward pass, and recomputes the rest of the block."""
    chunk: int | Literal["auto"] = "auto"
    """Process the norms, projections and feed-forward layers of a block in chunks of this many tokens, and recompute
    them chunk by chunk; 0 turns this off. auto is 0 up to 65,536 tokens per rank."""
    host_gib: float | None = Field(None, ge=0)
    """Host memory for offloaded activations per rank; the rest stays on the device. Default: 70 % of the machine's
    memory, divided by its ranks."""

    _check_chunk = limits(
        "chunk", valid=lambda tokens: tokens >= 0, must="a number of tokens, 0 for all at once, or auto"
    )
    _check_recompute = limits(
        "recompute", valid=lambda n: n >= 0, must="a number of blocks from 0 up, or auto, none, selective or full"
    )
