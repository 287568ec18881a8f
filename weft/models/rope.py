"""Rotary positions (Su et al. 2021) and their scaling to longer sequences."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.job.schema import RopeScaling

LENGTH_KINDS = ("dynamic", "longrope")
"""Kinds of scaling that depend on the length of the sequence."""


def frequencies(width: int, theta: float, scaling: RopeScaling | None, device: torch.device, length: int = 0) -> Tensor:
    """Angle a position for each pair of a head's `width` rotated values, [width / 2], in a sequence of `length`."""
    if scaling and scaling.kind in ("ntk", "dynamic"):
        factor = scaling.factor
        if scaling.kind == "dynamic":
            factor = factor * max(length / scaling.original_len, 1.0) - (factor - 1)
        theta = theta * factor ** (width / (width - 2))
    freq = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    if scaling is None or scaling.kind in ("ntk", "dynamic"):
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / freq
        smooth = (scaling.original_len / wavelength - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)
        smooth = smooth.clamp(0, 1)
        return freq * (smooth + (1 - smooth) / scaling.factor)
    if scaling.kind == "yarn":
        return _yarn(freq, width, theta, scaling)
    factors = scaling.long_factors if length > scaling.original_len else scaling.short_factors
    return freq / torch.tensor(factors, dtype=torch.float32, device=device)


def _yarn(freq: Tensor, width: int, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN (Peng et al. 2023, §3.2): a ramp between unscaled and fully scaled frequencies."""

    def pair_with(rotations: float) -> float:
        """The index of the pair that rotates so often in the original length."""
        return width * math.log(scaling.original_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    index = torch.arange(width // 2, dtype=torch.float32, device=freq.device)
    ramp = ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return freq / scaling.factor * ramp + freq * (1 - ramp)


def attention_factor(scaling: RopeScaling | None) -> float:
    """The factor on rotated queries and keys."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_len))


def rotation(positions: Tensor, freq: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine in fp32 for positions [seq] or [batch, seq]: [batch or 1, seq, 1, width / 2]."""
    angle = positions.float().unsqueeze(-1) * freq
    angle = angle.unsqueeze(-2)
    if angle.dim() == 3:
        angle = angle.unsqueeze(0)
    if factor == 1.0:
        return angle.cos(), angle.sin()
    return angle.cos() * factor, angle.sin() * factor


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first values of each head of x [batch, seq, heads, head_dim]; the halves of that part form pairs."""
    cos, sin = angles
    width = 2 * cos.shape[-1]
    a, b = x[..., :width].float().chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)
