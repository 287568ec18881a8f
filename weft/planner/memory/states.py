"""Bytes of parameters, gradients and optimizer states on a rank, exact to the padding, for many layouts at once."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

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

    whole: Size = 0.0
    """On this rank of tp or ep, before sharding."""
    padded: Size = 0.0
    """Of the shard, with the padding that makes all shards equal."""
    held: Size = 0.0
    gathered: Size = 0.0
    """All shards with their padding."""
    aligned: Size = 0.0
    """Before sharding, each weight aligned as in the buckets of replicas."""
    partial: Size = 0.0
    """Of the shard, weights whose gradients are summed over tp after the backward pass."""
    optimizer: Size = 0.0
    """Bytes of optimizer state."""
    compressed: Size = 0.0
    """Before sharding, weights whose gradients are compressed where the job compresses."""
    scratch: Size = 0.0
    """Bytes of temporary tensors while the optimizer updates a weight, at most."""

    def __add__(self, other: UnitSizes) -> UnitSizes:
        sums = {n: getattr(self, n) + getattr(other, n) for n in _SUMMED}
        return UnitSizes(**sums, scratch=np.maximum(self.scratch, other.scratch))

    def times(self, count: Size) -> UnitSizes:
        """The sums of `count` such units."""
        present = np.asarray(count) > 0
        return UnitSizes(**{n: getattr(self, n) * count for n in _SUMMED}, scratch=self.scratch * present)

    def take(self, chosen: Size) -> UnitSizes:
        """The same for some of the layouts."""
        return UnitSizes(**{n: np.asarray(getattr(self, n))[chosen] for n in (*_SUMMED, "scratch")})


_SUMMED = ("whole", "padded", "held", "gathered", "aligned", "partial", "optimizer", "compressed")


def unit_sizes(job: Job, layouts: Layouts, tp_rank: Size = 0, shard: Size = 0) -> dict[str, UnitSizes]:
    """Sizes by kind of unit (planner/model/parameters.py): on the first ranks, which hold most, or on those given."""
    cp = layouts.cp
    sharded = layouts.dp_shard > 1
    ways = np.where(sharded, layouts.dp_shard * cp, 1)
    rest = np.where(sharded, np.maximum(layouts.dp_shard * cp * layouts.tp // layouts.ep, 1), 1)
    out: dict[str, UnitSizes] = {}
    cut = unit_weights(job.model, True)
    for kind, weights in unit_weights(job.model, False).items():
        total = UnitSizes(*[np.zeros(len(layouts))] * 9)
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
    return UnitSizes(
        whole, padded, held, gathered, aligned, partial, FP32_BYTES * (entry.state(job.optim, shard) + 0.0 * held),
        whole * compressed, FP32_BYTES * (entry.scratch(shard) + 0.0 * held),
    )  # fmt: skip
