"""The codec of the largest numbers and their indices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from weft.comm.compression.codec_base import Agree, Codec, RoundingNoise, join_bytes, read_numbers, write_to
from weft.comm.fake_internals import is_fake

SAMPLE_STRIDE, OVERSAMPLING = 64, 1.3
"""One number in how many is sampled to estimate a limit, and how many times the wanted count should exceed it."""


def _top(size: Tensor, k: int) -> Tensor:
    """Indices of the k largest. On a CPU they are searched among those above an estimated limit, in a fraction of the
    time; a GPU would have to synchronise for their count."""
    few = math.ceil(OVERSAMPLING * k / SAMPLE_STRIDE) + 4
    if size.device.type == "cpu" and few < size.numel() // SAMPLE_STRIDE // 4 and not is_fake(size):
        limit = size[::SAMPLE_STRIDE].topk(few).values[-1]
        above = (size >= limit).nonzero().squeeze(1)
        if k <= above.numel() < size.numel() // 4:
            return above[size[above].topk(k, sorted=False).indices]
    return size.topk(k, sorted=False).indices


@dataclass(frozen=True)
class Largest(Codec):
    """The largest numbers with their indices: a share of all, or those above a multiple of the root mean square.

    They are chosen within each of `parts`, columns of so many numbers: some weights have smaller gradients than others,
    which would never be sent. All ranks send as many as the one with the most, so that messages have one size.
    """

    share: float = 0.0
    times: float = 0.0
    parts: tuple[int, ...] = ()
    feedback = sparse = True

    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor:
        columns = self.parts or (x.shape[1],)
        size = x.abs().split(columns, 1)
        counts = [self._count(n) for n in columns]
        if self.times and not is_fake(x):  # a dry run has no values
            counts = agree([self._above(part) for part in size])
        starts = accumulate(columns, initial=0)
        places = [
            torch.stack([_top(row, k) for row in part]) + start
            for part, k, start in zip(size, counts, starts, strict=False)
        ]
        chosen = torch.cat(places, 1)
        return join_bytes(chosen.int(), x.gather(1, chosen).bfloat16())

    def _above(self, size: Tensor) -> int:
        limit = self.times * size.square().mean(1, keepdim=True).sqrt()
        return max(1, int(((size >= limit) & (limit > 0)).sum(1).max()))

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        places, values = self.read(payload)
        return write_to(out, values.new_zeros(payload.shape[0], n).scatter_(1, places, values))

    def sum_of(self, payload: Tensor, n: int) -> Tensor:
        places, values = self.read(payload)
        total = values.new_zeros(n)
        for row in range(payload.shape[0]):
            total.index_add_(0, places[row], values[row])
        return total

    def read(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Indices and values, [rows, k] each."""
        k = payload.shape[1] // 6
        return read_numbers(payload, 0, k, torch.int32).long(), read_numbers(payload, 4 * k, k, torch.bfloat16).float()

    def _count(self, n: int) -> int:
        return min(n, max(1, math.ceil(self.share * n)))

    def bytes_of(self, n: int) -> int:
        return 6 * sum(self._count(part) for part in self.parts or (n,))
