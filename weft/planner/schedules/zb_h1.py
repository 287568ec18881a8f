"""ZB-H1: 1F1B with weight gradients moved into the bubble (Qi et al. 2024, arXiv 2401.10241)."""

from __future__ import annotations

import numpy as np

from weft.planner.schedules.actions import Action, join_backward, loop
from weft.planner.schedules.entry import ActionLists, ScheduleEntry, missing


def build(ranks: int, microbatches: int, stages_per_rank: int) -> ActionLists:
    """1F1B in which rank r delays r weight gradients; each rank holds at most `ranks` microbatches, as in 1F1B."""
    lists = []
    for rank in range(ranks):
        warmup = min(ranks - rank, microbatches)
        actions = [Action("F", rank, m) for m in range(warmup)]
        for m in range(microbatches):
            actions.append(Action("I", rank, m))
            if m >= rank:
                actions.append(Action("W", rank, m - rank))
            if m + warmup < microbatches:
                actions.append(Action("F", rank, m + warmup))
        actions += [Action("W", rank, m) for m in range(max(0, microbatches - rank), microbatches)]
        lists.append(join_backward(actions))
    return loop(ranks, ranks), lists


SCHEDULE = ScheduleEntry(
    name="zb-h1",
    description="1f1b with weight gradients delayed into the bubble",
    build=build,
    bubble=lambda shares, ranks, count: 1 - shares.weights * (2 - missing(ranks, count)),
    in_flight=lambda ranks, stages, rank, count: ranks,
    awaiting_backward=lambda ranks, stages, rank, count: ranks - rank,
    pending=lambda ranks, stages, rank, count: np.where(rank > 0, rank + 1.0, 0.0),
    allowed_stages=(1,),
    searched_stages=(1,),
    splits_backward=True,
    splits_on=lambda ranks, stages, rank, count: rank > 0,
)
