"""Bytes of parameters, gradients and optimizer states on a rank, exact to the padding, for many layouts at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from weft.job.optim import OPTIMIZERS, WeightShard
from weft.job.schema import Job
from weft.planner.engine_constants import (
    GRADIENT_ALIGNMENT,
    MIN_CODED_COLUMNS,
    STATE_SCALE_BLOCK,
    STREAMED_PIECE_ELEMENTS,
    UPDATED_ELEMENTS,
)
from weft.planner.memory.live_bytes import FP32_BYTES
from weft.planner.model.model_facts import Size
from weft.planner.model.parameters import unit_weights
from weft.planner.model.weight_table import Weight
from weft.planner.search.candidates import Layouts
from weft.planner.time.compression import compresses

LOW_HALF_BYTES = {"24bit-master": 1}
"""Of a split master weight, besides its compute weight, by memory.states; else 2."""


def low_half_bytes(states: str) -> int:
    """Bytes of the low half of a split master weight."""
    return LOW_HALF_BYTES.get(states, 2)


OUTSIDE_BLOCKS = frozenset({"begin", "norm", "head"})
"""Kinds of units that are no blocks."""


def piece_elements(job: Job, world: int, held: Size, blocks: bool = False) -> Size:
    """Elements of weights that are updated together where states are not all on the device, at most, if a rank holds
    `held`: one weight that cannot be cut may be more. With `blocks`, of weights in blocks."""
    size = np.minimum(STREAMED_PIECE_ELEMENTS, held)
    if world == 1 and OPTIMIZERS[job.optim.name].elementwise:
        return size
    kinds = unit_weights(job.model, False).items()
    weights = [w for kind, some in kinds if not (blocks and kind in OUTSIDE_BLOCKS) for w in some]
    return np.maximum(size, max((prod(w.shape) for w in weights), default=0) / world)


def stored_bytes(states: str, numbers: Size, held: Size, shape: tuple[int, ...]) -> Size:
    """Bytes of an optimizer's numbers for a weight: moments of its own shape are stored as memory.states sets."""
    if states == "exact" or len(shape) < 2 or shape[-1] < MIN_CODED_COLUMNS:
        return FP32_BYTES * numbers
    coded = np.floor(numbers / np.maximum(held, 1)) * held
    scales = FP32_BYTES * -(-shape[-1] // STATE_SCALE_BLOCK) / shape[-1]
    return FP32_BYTES * (numbers - coded) + (2 if states == "bf16" else 1 + scales) * coded


def _row(index: int, doc: str) -> Any:
    """A property that is a row of `sums`."""
    return property(lambda self: self.sums[index], doc=doc)


@dataclass(frozen=True)
class UnitSizes:
    """Elements that a rank holds of a unit's weights (a block, or what is outside the blocks), summed over weights."""

    sums: Any
    """One row for each property below, one column for each layout."""
    last: Size
    """Elements of the last trained weight, gathered."""
    scratch: Size
    """Bytes of temporary tensors while the optimizer updates a weight, at most; after it, while its copy is made; and
    of the weight itself in a batch: [3, layouts]."""

    whole = _row(0, "On this rank of tp or ep, before sharding.")
    padded = _row(1, "Of the shard, with the padding that makes all shards equal.")
    held = _row(2, "Of the shard.")
    gathered = _row(3, "All shards with their padding.")
    aligned = _row(4, "Before sharding, each weight aligned as in the buckets of replicas.")
    partial = _row(5, "Of the shard, weights whose gradients are summed over tp after the backward pass.")
    optimizer = _row(6, "Bytes of optimizer state.")
    compressed = _row(7, "Before sharding, weights whose gradients are compressed where the job compresses.")
    trained_whole = _row(8, "As whole, of weights that are trained.")
    trained_padded = _row(9, "As padded, of weights that are trained.")
    trained_held = _row(10, "As held, of weights that are trained.")
    trained_gathered = _row(11, "As gathered, of weights that are trained.")
    batched = _row(12, "Bytes of temporary tensors if the optimizer updated all weights together.")

    @property
    def updating(self) -> Size:
        """Bytes of temporary tensors while the optimizer updates a batch of weights."""
        return self.scratch[0] + np.minimum(self.batched, np.maximum(self.scratch[2], FP32_BYTES * UPDATED_ELEMENTS))

    def __add__(self, other: UnitSizes) -> UnitSizes:
        last = np.where(other.last > 0, other.last, self.last)
        return UnitSizes(self.sums + other.sums, last, np.maximum(self.scratch, other.scratch))

    def times(self, count: Size) -> UnitSizes:
        """The sums of `count` such units."""
        some = np.asarray(count) > 0
        return UnitSizes(self.sums * count, self.last * some, self.scratch * some)

    def take(self, chosen: Any) -> UnitSizes:
        """The same for some of the layouts."""
        return UnitSizes(
            self.sums.take(chosen, axis=1), self.last.take(chosen), self.scratch.take(chosen, axis=1)
        )  # fmt: skip

    def without_states(self) -> UnitSizes:
        """The same for a copy of weights that the optimizer does not update."""
        sums = self.sums.copy()
        sums[[6, 10, 12]] = 0.0  # optimizer, trained_held, batched
        return UnitSizes(sums, self.last, 0.0 * self.scratch)

    @classmethod
    def none(cls, layouts: int) -> UnitSizes:
        """Nothing, for a number of layouts."""
        return cls(np.zeros((13, layouts)), np.zeros(layouts), np.zeros((3, layouts)))


def unit_sizes(
    job: Job, layouts: Layouts, tp_rank: Size = 0, shard: Size = 0, rounds: bool = False
) -> dict[str, UnitSizes]:
    """Sizes by kind of unit (planner/model/parameters.py): on the first ranks, which hold most, or on those given.
    `rounds`: copies in bf16 are made by operators on whole weights, not by a kernel."""
    sharded = layouts.dp_shard > 1
    ways = np.where(sharded, layouts.dp_shard * layouts.cp, 1)
    rest = np.where(sharded, np.maximum(layouts.dp_shard * layouts.cp * layouts.tp // layouts.ep, 1), 1)
    under_sequence = unit_weights(job.model, True)
    sizes = {
        kind: _sizes(job, weights, under_sequence[kind], layouts, ways, rest, tp_rank, shard, rounds)
        if weights
        else UnitSizes.none(len(layouts))
        for kind, weights in unit_weights(job.model, False).items()
    }
    if job.model.has_head_bias or job.model.has_source:  # the head's weight is not the last
        sizes["head"] = replace(sizes["head"], last=np.zeros(len(layouts)))
    return sizes


def _sizes(
    job: Job, weights: Sequence[Weight], under_sequence: Sequence[Weight], layouts: Layouts, ways: Size, rest: Size,
    tp_rank: Size, place: Size, rounds: bool,
) -> UnitSizes:  # fmt: skip
    """The sums over some weights; arrays have one row for each weight and one column for each layout."""

    def column(values: Iterable[float]) -> Size:
        return np.array(list(values), float)[:, None]

    cut = [0 if w.cut is None else w.cut for w in weights]
    is_cut, by_rows = column(w.cut is not None for w in weights) > 0, column(c == 0 for c in cut) > 0
    size = column(w.shape[c] for w, c in zip(weights, cut, strict=True))
    step = np.ceil(size / layouts.tp)
    length = np.where(is_cut, np.minimum(step, size - np.minimum(tp_rank * step, size)), size)
    here = np.where(by_rows, length, column(w.shape[0] for w in weights))
    row = column(prod(w.shape[1:]) for w in weights)
    row = np.where(by_rows, row, row / size * length)
    chunk = np.ceil(here / ways)
    held = np.where(ways > 1, np.clip(here - place * chunk, 0, chunk), here) * row
    whole, padded, gathered = here * row, chunk * row, np.where(ways > 1, chunk * ways, here) * row
    partial = np.where(is_cut, 0.0, held)
    own = column(prod(w.shape) for w in weights) / layouts.ep
    own_padded, on_ep = np.ceil(own / rest), (column(w.experts for w in weights) > 0) & (layouts.ep > 1)
    whole, padded = np.where(on_ep, own, whole), np.where(on_ep, own_padded, padded)
    held, gathered = np.where(on_ep, own_padded, held), np.where(on_ep, own_padded * rest, gathered)
    partial = np.where(on_ep, 0.0, partial)
    aligned = np.ceil(whole / GRADIENT_ALIGNMENT) * GRADIENT_ALIGNMENT
    is_partial = np.where(
        layouts.sequence, column(w.partial for w in under_sequence) > 0, column(w.partial for w in weights) > 0
    )
    sent = (column(compresses(job.comm.compression, w) for w in weights) > 0) & (
        (layouts.tp == 1) | is_cut | is_partial
    )
    shards = [WeightShard(w.shape, own_held, w.in_block) for w, own_held in zip(weights, held, strict=True)]
    entries = [OPTIMIZERS[job.optim.name].of(shard) for shard in shards]
    pairs = list(zip(entries, shards, strict=True))
    numbers, scratch, batched = (
        np.stack([ask(entry, shard) + 0.0 * shard.held for entry, shard in pairs])
        for ask in (lambda e, shard: e.state(job.optim, shard), lambda e, s: e.scratch(s), lambda e, s: e.batched(s))
    )
    state = np.stack(
        [stored_bytes(job.memory.states, n, s.held, s.shape) for n, s in zip(numbers, shards, strict=True)]
    )
    trained = column(w.trained for w in weights)
    gradients = [trained * rows for rows in (aligned, partial, state, whole * sent, whole, padded, held, gathered)]
    gradients.append(trained * FP32_BYTES * batched)
    sums = np.stack([whole, padded, held, gathered, *gradients]).sum(1)
    rounding = 2.0 * held * rounds * (layouts.dp_shard == 1)  # two tensors of integers
    last = gathered[max((i for i, w in enumerate(weights) if w.trained), default=0)] * trained.max()
    return UnitSizes(sums, last, FP32_BYTES * (trained * np.stack([scratch, rounding, batched])).max(1))
