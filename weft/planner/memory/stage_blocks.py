"""Blocks of each rank of a pipeline, for many layouts at once."""

from __future__ import annotations

from functools import cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from weft.job.errors import JobError
from weft.job.schema import Job
from weft.planner.model.counts import part_costs
from weft.planner.model.model_facts import Size
from weft.planner.schedules.actions import vee
from weft.planner.schedules.known_schedules import SCHEDULE_NAMES, SCHEDULES
from weft.planner.schedules.stage_split import split_layers, split_stages
from weft.planner.search.candidates import Layouts, distinct


def split_blocks(job: Job, stages: int, pairs: bool) -> tuple[tuple[int, int], ...]:
    """First block and end of each pipeline stage; a JobError where the model has too few blocks."""
    pinned = job.parallel.split if job.parallel != "auto" else None
    parts = part_costs(job.model, job.data.seq_len)
    if job.model.takes_vectors:
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
    at_once: Size
    """Those of stages with a recomputed block, which make all their gradients in one pass."""
    joins: Size
    """1 where they include the first block after the dense ones: the first of a decoder, or with experts."""


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
        self._inner = cache(self._inner_ranks)
        self._split = cache(partial(split_blocks, job))
        self.job = job

    def _by_rank(self, pp: int, virtual: int, shape: bool, pairs: bool, again: int) -> Ranks:
        """BlockCounts of each rank of a pipeline that recomputes `again` blocks."""
        whole = (self.layers, self.first_dense, again, again, self.layers * (again > 0), 1)
        if pp == 1:
            return [whole]
        stages = pp * virtual
        try:
            split = self._split(stages, pairs)
        except JobError:  # never chosen: more stages than blocks
            return [whole] * pp
        rank_of = vee(pp) if shape else tuple(s % pp for s in range(stages))
        blocks, dense, recomputed, weighted, waits, at_once, joins = ([0] * pp for _ in range(7))
        for stage, ((first, end), rank) in enumerate(zip(split, rank_of, strict=True)):
            blocks[rank] += end - first
            dense[rank] += max(0, min(end, self.first_dense) - first)
            joins[rank] += first <= self.first_dense < end
            # spread evenly, as in memory/recompute.py
            here = end * again // self.layers - first * again // self.layers
            waiting = _waiting(pp, virtual, shape, rank, stage)
            recomputed[rank] += here
            at_once[rank] += (end - first) * (here > 0)
            weighted[rank] += here * waiting
            waits[rank] += waiting
        counted = [min(blocks[r], virtual * weighted[r] / max(1, waits[r])) for r in range(pp)]
        return list(zip(blocks, dense, recomputed, counted, at_once, joins, strict=True))

    def at(self, layouts: Layouts, index: Size) -> BlockCounts:
        """Blocks of pipeline rank `index`."""
        piped, (pairs, again) = layouts.pp > 1, self._columns(layouts)
        columns = (
            layouts.pp, np.where(piped, layouts.virtual_stages, 1), layouts.back_and_forth & piped, pairs, again, index,
        )  # fmt: skip
        first, position = distinct(*columns)
        given = zip(*(column[first].tolist() for column in columns), strict=True)
        table = [self._ranks(*pipeline)[i] for *pipeline, i in given]
        return BlockCounts(*np.array(table, float).reshape(-1, len(BlockCounts._fields))[position].T)

    def inner(self, layouts: Layouts, copied: bool) -> list[Size]:
        """Ranks between the ends of pipelines that may hold most, one or more of each layout; 0 where there are fewer.
        `copied` where ranks keep copies of what they send."""
        pairs, again = self._columns(layouts)
        count = np.minimum(layouts.accumulation, 2 * layouts.pp + 1)  # more change nothing
        every = (layouts.recompute > 0) & (layouts.recompute_blocks < 0)
        columns = (layouts.pp, layouts.virtual_stages, pairs, again, layouts.schedule, count, every)
        first, position = distinct(*columns)
        rows = [self._inner(*given, copied) for given in zip(*(c[first].tolist() for c in columns), strict=True)]
        return [np.array(number)[position] for number in zip_longest(*rows, fillvalue=0)]

    def _inner_ranks(
        self, pp: int, virtual: int, pairs: bool, again: int, schedule: int, count: int, every: bool, copied: bool
    ) -> list[int]:
        """Of inner ranks with equal blocks, those with most microbatches, or most that wait for gradients of weights;
        without those that hold less than another one, or than the first rank, which has one neighbour. `every` block
        is recomputed, or `again` of them."""
        entry = SCHEDULES[SCHEDULE_NAMES[schedule]]
        ranks = self._ranks(pp, virtual, entry.last_stage_on_first_rank, pairs, again)
        given = pp, virtual, np.arange(pp), count
        held, waiting = entry.in_flight(*given), entry.pending(*given)
        if entry.splits_backward:
            one_pass = np.array([b > 0 if every else once == b for b, *_, once, _ in ranks])
            waits = entry.awaiting_backward or entry.in_flight
            held, waiting = np.where(one_pass, waits(*given), held), np.where(one_pass, 0.0, waiting)
        flight = np.minimum(held, count) + np.zeros(pp)
        pending = (waiting + np.zeros(pp)).tolist()
        # gradients are there while as many wait
        steady = (entry.last_stage_on_first_rank & (count > flight * virtual - given[2] - 1)).tolist()
        flight = flight.tolist()
        rows = [(d, b - d, -a, flight[r], pending[r], steady[r]) for r, (b, d, _, a, *_) in enumerate(ranks)]
        kinds: dict[Any, list[int]] = {}
        for r in range(1, pp - 1):
            kinds.setdefault(rows[r][:3], []).append(r)
        sought = [3, *(i for i in (4, 5) if any(row[i] for row in rows))]
        most = {max(same, key=lambda r: (rows[r][i], rows[r], -r)) for same in kinds.values() for i in sought}
        rivals = [0, *most] if not copied else most

        def beaten(r: int) -> bool:
            others = (o for o in rivals if o != r and (o or flight[0] > flight[r]))
            return any(all(x >= y for x, y in zip(rows[o], rows[r], strict=True)) for o in others)

        return sorted(r for r in most if not beaten(r))

    def _columns(self, layouts: Layouts) -> tuple[Size, Size]:
        """Whether layers are cut in pairs, and how many blocks are recomputed."""
        return (layouts.tp > 1) & self.job.model.takes_vectors, np.clip(layouts.recompute_blocks, 0, self.layers)
