"""Initial values of table rows: a function of the seed, the table, the row and the column, the same in any layout."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_INCREMENT = _signed(0x9E3779B97F4A7C15)


def table_key(seed: int, table: str) -> int:
    """The number from which the values of a table are drawn."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest(), "big", signed=True)


def initial_rows(keys: Tensor, rows: Tensor, bounds: Tensor, dim: int, left: int, right: int) -> Tensor:
    """Uniform values between -bound and bound of some rows, columns left … right - 1. [rows, right - left]

    `keys` are those of the rows' tables. Values are the upper bits of SplitMix64 (Steele et al., 2014) of an element's
    number: exact on every device.
    """
    columns = torch.arange(left, right, device=rows.device)
    x = (rows.unsqueeze(-1) * dim + columns + 1) * _INCREMENT + keys.unsqueeze(-1)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        x = (x ^ _shifted(x, shift)) * multiplier
    x = x ^ _shifted(x, 31)
    return (_shifted(x, 40).float() * 2.0**-23 - 1.0) * bounds.unsqueeze(-1)


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by without the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
