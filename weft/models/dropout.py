"""Dropout whose mask depends on seed, sample and position alone: the same in every layout and when recomputed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LOW = {30: (1 << 34) - 1, 27: (1 << 37) - 1, 31: (1 << 33) - 1}
_A, _B, _C = 0x1E3779B97F4A7C15, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def mix(h: Tensor) -> Tensor:
    """Scramble int64 keys (the finaliser of splitmix64, Steele et al. 2014)."""
    h = (h ^ ((h >> 30) & _LOW[30])) * _B
    h = (h ^ ((h >> 27) & _LOW[27])) * _C
    return h ^ ((h >> 31) & _LOW[31])


def salt(site: int) -> int:
    """The offset that a dropout site adds to the keys, wrapped to int64."""
    return ((site * _A + 2**63) % 2**64) - 2**63


class Dropout(nn.Module):
    """Drop a share of x [batch, seq, dim]; `keys` [batch] identify samples, `rows` [seq] are token indices."""

    def __init__(self, p: float, site: int):
        super().__init__()
        self.p = p
        self.salt = salt(site)

    def forward(self, x: Tensor, keys: Tensor | None, rows: Tensor, first: int = 0) -> Tensor:
        # first: index of x's first value, where x is a part of the width
        if not self.training or self.p == 0 or keys is None:
            return x
        row_keys = mix(mix(keys + self.salt).unsqueeze(1) + rows)  # [batch, seq]
        noise = mix(row_keys.unsqueeze(2) + torch.arange(first, first + x.shape[2], device=x.device) * _A)
        keep = (noise >> 40) & 0xFFFFFF >= int(self.p * (1 << 24))
        return x * keep * (1 / (1 - self.p))
