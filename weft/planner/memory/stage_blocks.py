"""Blocks of each rank of a pipeline, for many layouts at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from weft.job.errors import JobError
from weft.job.schema import Job
from weft.planner.model.counts import part_costs
from weft.planner.model.model_facts import Size
from weft.planner.schedules.actions import vee
from weft.planner.schedules.stage_split import split_layers, split_stages
from weft.planner.search.candidates import Layouts, distinct


def split_blocks(job: Job, stages: int, pairs: bool) -> tuple[tuple[int, int], ...]:
    """First block and end of each pipeline stage; a JobError where the model has too few blocks."""
    pinned = job.parallel.split if job.parallel != "auto" else None
    parts = part_costs(job.model, job.data.seq_len)
    if job.model.is_stack:
        return tuple(split_layers(parts[1:-1], stages, pinned, pairs=pairs))
    layers = len(parts) - 2
    return tuple((max(0, a - 1), min(layers, b - 1)) for a, b in split_stages(parts, stages, pinned))


class BlockCounts(NamedTuple):
    """Blocks of a pipeline rank, one entry for each layout."""

    blocks: Size
    dense: Size
    again: Size
    """Those recomputed, where the layout gives their number."""
    again_waiting: Size
    """The same, each counted by the share of waiting microbatches that its stage holds."""


def _waiting(pp: int, virtual: int, vee_shaped: bool, rank: int, stage: int) -> int:
    """Microbatches that a stage holds besides the one that passes, when its rank holds most."""
    if vee_shaped:
        return rank if stage >= pp else 2 * pp - 2 - rank
    forwards = 2 * (pp - rank - 1) + (virtual - 1) * pp + 1  # before the first backward pass, in groups of pp
    rounds, rest = divmod(forwards, pp * virtual)
    return max(0, rounds * pp + min(max(rest - stage // pp * pp, 0), pp) - 1)


Ranks = list[tuple[float, ...]]
"""BlockCounts of each rank of a pipeline."""


class StageBlocks:
    """How many blocks, dense and with experts, the ranks of a job's pipelines have."""

    def __init__(self, job: Job):
        self.layers = job.model.layers or 0
        self.first_dense = self.layers if job.model.first_blocks is None else job.model.first_blocks
        self._ranks = cache(self._by_rank)
        self._split = cache(partial(split_blocks, job))
        self.job = job

    def _by_rank(self, pp: int, virtual: int, shape: bool, pairs: bool, again: int) -> Ranks:
        """BlockCounts of each rank of a pipeline that recomputes `again` blocks."""
        whole = (self.layers, self.first_dense, again, again)
        if pp == 1:
            return [whole]
        stages = pp * virtual
        try:
            split = self._split(stages, pairs)
        except JobError:  # never chosen: more stages than blocks
            return [whole] * pp
        rank_of = vee(pp) if shape else tuple(s % pp for s in range(stages))
        blocks, dense, recomputed, weighted, waits = ([0] * pp for _ in range(5))
        for stage, ((first, end), rank) in enumerate(zip(split, rank_of, strict=True)):
            blocks[rank] += end - first
            dense[rank] += max(0, min(end, self.first_dense) - first)
            # spread evenly, as in memory/recompute.py
            here = end * again // self.layers - first * again // self.layers
            waiting = _waiting(pp, virtual, shape, rank, stage)
            recomputed[rank] += here
            weighted[rank] += here * waiting
            waits[rank] += waiting
        counted = [min(blocks[r], virtual * weighted[r] / max(1, waits[r])) for r in range(pp)]
        return list(zip(blocks, dense, recomputed, counted, strict=True))

    def at(self, layouts: Layouts, index: Size) -> BlockCounts:
        """Blocks of pipeline rank `index`."""
        table = self._look_up(layouts, index, lambda ranks, i: ranks[i])
        return BlockCounts(*np.array(table[0], float).reshape(-1, 4)[table[1]].T)

    def largest(self, layouts: Layouts) -> Size:
        """The first rank between the ends of each pipeline that has more blocks than the first, or more with experts;
        0 where there is none."""
        table, position = self._look_up(layouts, np.zeros(len(layouts), np.int64), lambda ranks, _: _larger(ranks))
        return np.array(table, np.int64)[position]

    def _look_up(self, layouts: Layouts, index: Size, row: Callable[[Ranks, int], Any]) -> tuple[list[Any], Any]:
        """A row for each kind of pipeline and rank, and the position of each layout's."""
        piped = layouts.pp > 1
        virtual = np.where(piped, layouts.virtual_stages, 1)
        shape = layouts.back_and_forth & piped
        pairs = (layouts.tp > 1) & (self.job.model.is_stack)
        again = np.clip(layouts.recompute_blocks, 0, self.layers)
        first, position = distinct(layouts.pp, virtual, shape, pairs, index, again)
        columns = (each[first].tolist() for each in (layouts.pp, virtual, shape, pairs, again, index))
        return [row(self._ranks(*given), i) for *given, i in zip(*columns, strict=True)], position


def _larger(ranks: Ranks) -> int:
    inner = min(range(1, len(ranks) - 1), key=lambda r: (-ranks[r][0], ranks[r][1], r), default=0)
    return inner if ranks[inner][0] > ranks[0][0] or ranks[inner][1] < ranks[0][1] else 0
