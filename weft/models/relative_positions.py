"""Relative positions: what the distance of a key from a query adds to their score (Raffel et al. 2020, §2.1)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def position_buckets(distance: Tensor, both_sides: bool, buckets: int, limit: int) -> Tensor:
    """The bucket of each distance (position of the key less that of the query): one for each short distance, then
    wider ones up to `limit`."""
    first = torch.zeros_like(distance)
    if both_sides:
        buckets //= 2
        first, distance = (distance > 0).long() * buckets, distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(limit / exact) * (buckets - exact)
    far = (exact + growth.long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


def position_scores(table: Tensor, queries: range, keys: range, both_sides: bool, limit: int) -> Tensor:
    """What a table [buckets, heads] adds to the scores of queries and keys at some positions: [heads, queries, keys]"""
    first, last = keys.start - queries.stop + 1, keys.stop - queries.start
    distances = torch.arange(first, last, device=table.device)
    of_distances = F.embedding(position_buckets(distances, both_sides, len(table), limit), table)
    out: Tensor = _Spread.apply(of_distances.t(), len(queries))
    return out


class _Spread(torch.autograd.Function):
    """From one value a distance, [heads, distances], to one for each query and key. Gradients are summed in fp32."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, queries: int) -> Tensor:
        return values.unfold(1, values.shape[1] - queries + 1, 1).flip(1)  # a window of distances for each query

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        heads, queries, keys = grads[0].shape
        distances = queries + keys - 1
        # rows that are one longer than the distances, read as rows of the distances: each is one further to the right
        shifted = F.pad(grads[0].flip(1), (0, queries)).flatten(1)[:, : queries * distances]
        summed = shifted.view(heads, queries, distances).sum(1, dtype=torch.float32)
        return summed.to(grads[0].dtype), None
