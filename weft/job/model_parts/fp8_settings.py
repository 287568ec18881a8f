"""`fp8`: scaling and scope of fp8 matrix products."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.job.section import Section


class Fp8(Section):
    """Scaling and scope of fp8 matrix products, with precision: fp8."""

    scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """One scale per tensor (fastest), or one per row and column (more precise: an outlier affects only its own row)."""
    amax: Literal["auto", "dynamic", "delayed"] = "auto"
    """Source of the largest absolute value that a scale is computed from: the tensor itself (dynamic), or with
    tensorwise scaling the previous steps (delayed), which saves a pass over the tensor and clips larger values. auto:
    delayed, and dynamic with rowwise scaling or where ranks do not synchronize every step."""
    history: int = Field(16, ge=1, le=10_000)
    """Length of the amax history in steps (delayed)."""
    fast_accumulation: Literal["none", "forward", "all"] = "forward"
    """Matrix products that use the fast, lower-precision accumulation of NVIDIA's tensor cores."""
    head: bool = True
    """Also use fp8 for the head of a model that predicts tokens: faster with a large vocabulary, but less precise
    logits. A head with a bias, or whose sizes are not multiples of 16, stays in bf16."""
    skip: list[str] = Field(default_factory=list)
    """Layers that stay in bf16, as patterns of module paths, such as [blocks.0.*, "*.down"]. Embedding, norms,
    attention and layers whose sizes are not multiples of 16 always stay in bf16."""
