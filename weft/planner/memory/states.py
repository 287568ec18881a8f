"""Bytes of parameters, gradients and optimizer states on a rank, exact to the padding, for many layouts at once."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from weft.job.optim import OPTIMIZERS, WeightShard
from weft.job.schema import Job
from weft.planner.engine_constants import GRADIENT_ALIGNMENT
from weft.planner.memory.live_bytes import FP32_BYTES
from weft.planner.model.facts import Size
from weft.planner.model.parameters import unit_weights
from weft.planner.model.weight_table import Weight
from weft.planner.search.candidates import Layouts
from weft.planner.time.compression import compresses


@dataclass(frozen=True)
class UnitSizes:
    """Elements that a rank holds of a unit's weights (a block, or what is outside the blocks), summed over weights."""

    sums: Any
    """One row for each property below, one column for each layout."""
    scratch: Size
    """Bytes of temporary tensors while the optimizer updates a weight, at most."""

    @property
    def whole(self) -> Size:
        """On this rank of tp or ep, before sharding."""
        return self.sums[0]

    @property
    def padded(self) -> Size:
        """Of the shard, with the padding that makes all shards equal."""
        return self.sums[1]

    @property
    def held(self) -> Size:
        """Of the shard."""
        return self.sums[2]

    @property
    def gathered(self) -> Size:
        """All shards with their padding."""
        return self.sums[3]

    @property
    def aligned(self) -> Size:
        """Before sharding, each weight aligned as in the buckets of replicas."""
        return self.sums[4]

    @property
    def partial(self) -> Size:
        """Of the shard, weights whose gradients are summed over tp after the backward pass."""
        return self.sums[5]

    @property
    def optimizer(self) -> Size:
        """Bytes of optimizer state."""
        return self.sums[6]

    @property
    def compressed(self) -> Size:
        """Before sharding, weights whose gradients are compressed where the job compresses."""
        return self.sums[7]

    def __add__(self, other: UnitSizes) -> UnitSizes:
        return UnitSizes(self.sums + other.sums, np.maximum(self.scratch, other.scratch))

    def times(self, count: Size) -> UnitSizes:
        """The sums of `count` such units."""
        return UnitSizes(self.sums * count, self.scratch * (np.asarray(count) > 0))

    def take(self, chosen: Any) -> UnitSizes:
        """The same for some of the layouts."""
        return UnitSizes(self.sums[:, chosen], self.scratch[chosen])

    @classmethod
    def none(cls, layouts: int) -> UnitSizes:
        """Nothing, for a number of layouts."""
        return cls(np.zeros((8, layouts)), np.zeros(layouts))


def unit_sizes(job: Job, layouts: Layouts, tp_rank: Size = 0, shard: Size = 0) -> dict[str, UnitSizes]:
    """Sizes by kind of unit (planner/model/parameters.py): on the first ranks, which hold most, or on those given."""
    cp = layouts.cp
    sharded = layouts.dp_shard > 1
    ways = np.where(sharded, layouts.dp_shard * cp, 1)
    rest = np.where(sharded, np.maximum(layouts.dp_shard * cp * layouts.tp // layouts.ep, 1), 1)
    out: dict[str, UnitSizes] = {}
    cut = unit_weights(job.model, True)
    for kind, weights in unit_weights(job.model, False).items():
        total = UnitSizes.none(len(layouts))
        for w, sequential in zip(weights, cut[kind], strict=True):
            partial = np.where(layouts.sequence, sequential.partial, w.partial)
            total = total + _weight_sizes(job, w, partial, layouts, ways, rest, tp_rank, shard)
        out[kind] = total
    return out


def _weight_sizes(
    job: Job, w: Weight, is_partial: Size, layouts: Layouts, ways: Size, rest: Size, tp_rank: Size, place: Size
) -> UnitSizes:  # fmt: skip
    rows, row = w.shape[0], prod(w.shape[1:])
    here: Size = np.full(len(layouts), float(rows))
    if w.cut is not None:
        size = w.shape[w.cut]
        step = -(-size // layouts.tp)
        length = np.minimum(step, size - np.minimum(tp_rank * step, size))
        if w.cut == 0:
            here = length.astype(float)
        else:
            row = row // size * length
    chunk = np.ceil(here / ways)
    held = np.where(ways > 1, np.clip(here - place * chunk, 0, chunk), here) * row
    whole, padded, gathered = here * row, chunk * row, np.where(ways > 1, chunk * ways, here) * row
    partial = held * float(w.cut is None)
    if w.experts:
        own = prod(w.shape) / layouts.ep
        on_ep = layouts.ep > 1
        own_padded = np.ceil(own / rest)
        whole, padded = np.where(on_ep, own, whole), np.where(on_ep, own_padded, padded)
        held, gathered = np.where(on_ep, own_padded, held), np.where(on_ep, own_padded * rest, gathered)
        partial = np.where(on_ep, 0.0, partial)
    aligned = np.ceil(whole / GRADIENT_ALIGNMENT) * GRADIENT_ALIGNMENT
    shard = WeightShard(w.shape, held, bool(w.unit))
    entry = OPTIMIZERS[job.optim.name].of(shard)
    compressed = compresses(job.comm.compression, w) & ((layouts.tp == 1) | (w.cut is not None) | is_partial)
    state = FP32_BYTES * (entry.state(job.optim, shard) + 0.0 * held)
    sums = np.stack([whole, padded, held, gathered, aligned, partial, state, whole * compressed])
    return UnitSizes(sums, FP32_BYTES * (entry.scratch(shard) + 0.0 * held))
