"""`model.towers`: the encoders of a model with several."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.job.section import Section

TowerName = Literal["image", "text"]


class TowerShape(Section):
    """One encoder of a model with several (clip)."""

    dim: int = Field(ge=1, le=2**20)
    """Width of the residual stream."""
    layers: int = Field(ge=1, le=10_000)
    """Number of blocks."""
    heads: int = Field(ge=1, le=65_536)
    """Attention heads."""
    ffn: int | None = Field(None, ge=1, le=2**24)
    """Hidden width of the feed-forward layer. Default: 4 × dim."""
    patch: int = Field(16, ge=1, le=4096)
    """Side of an image patch in pixels (image)."""

    end: int | Literal["largest"] | None = None
    """Token whose vector is a text's: the first of this number, or of the largest number in the text (text). Default:
    that of the last position."""

    @property
    def width(self) -> int:
        """Hidden width of the feed-forward layer."""
        return self.ffn or 4 * self.dim
