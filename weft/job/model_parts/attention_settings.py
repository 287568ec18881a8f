"""`model.rope_scaling` and `model.latent`: rotary positions of long sequences, and latent attention."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.job.section import Section


class RopeScaling(Section):
    """Scaling of rotary positions for sequences longer than the model was trained on."""

    kind: Literal["linear", "ntk", "dynamic", "llama3", "yarn", "longrope"] = "llama3"
    """linear divides positions; ntk raises the base, and dynamic by the length of sequences above original_len; llama3
    scales only the low frequencies; yarn does so with a linear ramp and scales the attention; longrope has a factor for
    each frequency."""
    factor: float = Field(8.0, ge=1)
    """Factor by which sequences become longer."""
    original_len: int = Field(8192, ge=1, le=2**31)
    """Sequence length of the original training (dynamic, llama3, yarn, longrope)."""
    low_freq: float = Field(1.0, gt=0)
    """Wavelengths longer than original_len / low_freq are scaled by the full factor (llama3)."""
    high_freq: float = Field(4.0, gt=0)
    """Wavelengths shorter than original_len / high_freq are not scaled (llama3)."""
    beta_fast: float = Field(32.0, gt=0)
    """Frequencies with more rotations than this in original_len are not scaled (yarn)."""
    beta_slow: float = Field(1.0, gt=0)
    """Frequencies with fewer rotations than this in original_len are scaled by the full factor (yarn)."""
    truncate: bool = True
    """Round the ends of the ramp to whole frequencies (yarn)."""
    attention_factor: float | None = Field(None, gt=0)
    """Factor on the rotated queries and keys (yarn, longrope). Default: from `factor`, as published."""
    short_factors: tuple[float, ...] = ()
    """Factor of each frequency in sequences of at most original_len (longrope)."""
    long_factors: tuple[float, ...] = ()
    """Factor of each frequency in longer sequences (longrope)."""


class Latent(Section):
    """Multi-head latent attention (DeepSeek-V2): keys and values are expanded from one small vector a token. A head has
    model.head_dim values, of which model.rope_dim are rotated."""

    q_rank: int | None = Field(None, ge=1, le=2**20)
    """Width of the vector from which queries are expanded. Default: queries come from the input itself."""
    kv_rank: int = Field(512, ge=1, le=2**20)
    """Width of the vector from which keys and values are expanded."""
    v_dim: int = Field(128, ge=1, le=65_536)
    """Width of a head's values, at most model.head_dim."""
