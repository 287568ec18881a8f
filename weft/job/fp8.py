"""`fp8`: scaling of the fp8 products."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.job.section import Section


class Fp8(Section):
    """With precision: fp8, how the numbers of the blocks' matrix products are brought into fp8's small range."""

    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """One scale a tensor (fastest), or one for each row and column (finer: an outlier costs only its own row)."""
    amax: Literal["dynamic", "delayed"] = "dynamic"
    """The largest value that a scale is made from: the tensor's own, or (tensorwise) that of the steps before, which
    saves a pass over the tensor and clips what is larger."""
    history: int = Field(16, ge=1)
    """Steps remembered (delayed)."""
    fast_accumulation: Literal["none", "forward", "all"] = "forward"
    """Which products may add up in the tensor cores' own shorter registers, as NVIDIA's GPUs do fastest."""
    head: bool = False
    """Whether the head multiplies in fp8 as well: faster with a large vocabulary, and coarser where it matters most."""
    skip: list[str] = Field(default_factory=list)
    """Layers of the blocks that stay in bf16, as patterns of paths: [blocks.0.*, "*.down"]. Embedding, norms, attention
    and layers whose sizes are no multiples of 16 always do."""
