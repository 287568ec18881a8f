"""Rotary positions (Su et al. 2021) and their scaling to longer sequences."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.job.schema import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Angle a position for each pair of a head's values, [head_dim / 2]."""
    if scaling and scaling.kind == "ntk":
        theta = theta * scaling.factor ** (head_dim / (head_dim - 2))
    freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    if scaling and scaling.kind == "linear":
        return freq / scaling.factor
    if scaling and scaling.kind == "llama3":
        wavelength = 2 * math.pi / freq
        smooth = (scaling.original_len / wavelength - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)
        smooth = smooth.clamp(0, 1)
        return freq * (smooth + (1 - smooth) / scaling.factor)
    return freq


def rotation(positions: Tensor, freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine in fp32 for positions [seq] or [batch, seq]: [batch or 1, seq, 1, head_dim / 2]."""
    angle = positions.float().unsqueeze(-1) * freq
    angle = angle.unsqueeze(-2)
    if angle.dim() == 3:
        angle = angle.unsqueeze(0)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [batch, seq, heads, head_dim]; the two halves of a head form the pairs."""
    cos, sin = angles
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
