"""Interleaved 1F1B: several stages on each rank (Narayanan et al. 2021, arXiv 2104.04473)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from weft.planner.schedules import one_f_one_b
from weft.planner.schedules.actions import Action, loop
from weft.planner.schedules.entry import ActionLists, ScheduleEntry, Size, missing


def build(ranks: int, microbatches: int, stages_per_rank: int) -> ActionLists:
    """1F1B in which microbatches pass through a rank's stages in groups.

    The paper uses groups of `ranks` microbatches. Groups of at least that size, as even as possible, work for any
    number of microbatches and have the same bubble.
    """
    if stages_per_rank == 1:
        return one_f_one_b.build(ranks, microbatches, 1)
    count = max(1, microbatches // ranks)
    edges = [microbatches * i // count for i in range(count + 1)]
    groups = [range(a, b) for a, b in pairwise(edges)]
    widest = max(len(g) for g in groups)
    lists = []
    for rank in range(ranks):
        own = range(rank, ranks * stages_per_rank, ranks)
        forward = [Action("F", s, m) for group in groups for s in own for m in group]
        backward = [Action("B", s, m) for group in groups for s in reversed(own) for m in group]
        warmup = 2 * (ranks - rank - 1) + (stages_per_rank - 1) * widest
        lists.append(one_f_one_b.alternate(forward, backward, warmup))
    return loop(ranks, ranks * stages_per_rank), lists


def _in_flight(ranks: Size, stages: Size, rank: Size, microbatches: Size) -> Size:
    """The forward passes before the first backward pass, and the one between each two of these."""
    widest = np.ceil(microbatches / np.maximum(1, microbatches // ranks))
    held = (2 * (ranks - rank - 1) + (stages - 1) * widest + 1) / stages
    return np.where(stages == 1, ranks - rank, held)


SCHEDULE = ScheduleEntry(
    name="interleaved-1f1b",
    description="1f1b over several smaller stages per rank, so that ranks wait less",
    build=build,
    bubble=lambda shares, ranks, count: 1.0 + missing(ranks, count),
    in_flight=_in_flight,
    default_stages=2,
    searched_stages=(2, 3, 4, 5, 6, 7, 8),
)
