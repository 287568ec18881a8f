"""What every codec has: rows of fp32 become rows of bytes and back, and encoded rows are summed.

A codec is either unbiased, by stochastic rounding, so that errors cancel over ranks and steps, or has error feedback
(`feedback`): what it did not send is added to the next message. Decoded fp32 numbers are summed, so no sum overflows.
Values that are not finite stay so, so that the loss scale sees them on every rank.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from weft.planner.engine_constants import NOISE_VALUES

Agree = Callable[[list[int]], list[int]]
"""Returns the largest of the ranks' numbers, for each number."""


class RoundingNoise:
    """Noise for stochastic rounding: a window, at a random position, of a table of uniformly spread numbers.

    Every number is equally likely at every position, which is all that unbiased rounding needs; a window costs a copy
    instead of a random generator. `draws` is the whole state.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.draws = seed, 0
        order = torch.randperm(NOISE_VALUES, generator=torch.Generator().manual_seed(0))
        self.table = ((order.float() + 0.5) / NOISE_VALUES).repeat(2).to(device)

    def noise(self, rows: int, count: int) -> Tensor:
        """[rows, count] numbers between 0 and 1."""
        self.draws += 1
        place = random.Random(f"{self.seed} {self.draws}").randrange(NOISE_VALUES)
        window, wanted = self.table[place : place + NOISE_VALUES], rows * count
        if wanted > NOISE_VALUES:
            window = window.repeat(-(-wanted // NOISE_VALUES))
        return window[:wanted].view(rows, count)


class Codec(ABC):
    """Encodes [rows, n] of fp32 as [rows, bytes], and decodes it."""

    feedback = False
    """Whether the residual is added to the next message."""
    sparse = False
    """Whether it sends some numbers with their indices."""

    @abstractmethod
    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor:
        """[rows, n] → [rows, bytes]; without `rounding`, numbers are rounded to nearest."""

    @abstractmethod
    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        """[rows, bytes] → [rows, n], in `out` if that is given."""

    @abstractmethod
    def bytes_of(self, n: int) -> int:
        """Bytes of a row of n numbers."""

    def sum_of(self, payload: Tensor, n: int) -> Tensor:
        """The sum of the decoded rows, in row order."""
        rows = self.decode(payload, n)
        return rows[0] if len(rows) == 1 else rows.sum(0)

    def encode_sum(
        self, payload: Tensor, own: Tensor, rounding: RoundingNoise | None, agree: Agree, missing: Tensor | None
    ) -> Tensor:
        """The encoded sum of own, [n], and of received rows, [rows, bytes]; `missing`, [n], becomes what that loses."""
        total = self.sum_of(payload, own.numel()).add_(own)
        out = self.encode(total[None], rounding, agree)
        if missing is not None:
            torch.sub(total, self.decode(out, own.numel())[0], out=missing)
        return out


def to_blocks(x: Tensor, block: int) -> Tensor:
    """[rows, n] → [rows, blocks, block], padded with zeros."""
    rows, n = x.shape
    if n % block:
        x = functional.pad(x, (0, -n % block))
    return x.view(rows, -1, block)


def join_bytes(*parts: Tensor) -> Tensor:
    """Parts of any dtype, [rows, …] each, as one row of bytes a row."""
    return torch.cat([p.contiguous().view(torch.uint8).flatten(1) for p in parts], 1)


def read_numbers(payload: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers of a dtype that begin at a byte of each row."""
    part = payload[:, start : start + count * dtype.itemsize]
    return part.clone(memory_format=torch.contiguous_format).view(dtype)  # bytes may be unaligned


def write_to(out: Tensor | None, values: Tensor) -> Tensor:
    """The values, in `out` if that is given."""
    return values if out is None else out.copy_(values)


def largest(blocks: Tensor) -> Tensor:
    """The largest absolute value in each block: thirty times as fast on a CPU as torch's infinity norm."""
    return torch.maximum(blocks.amax(-1), -blocks.amin(-1))
