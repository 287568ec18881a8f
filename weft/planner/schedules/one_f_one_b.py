"""1F1B: one forward, one backward (PipeDream-flush; Narayanan et al. 2021, arXiv 2104.04473)."""

from __future__ import annotations

from weft.planner.schedules.actions import Action, loop
from weft.planner.schedules.entry import ActionLists, ScheduleEntry


def build(ranks: int, microbatches: int, stages_per_rank: int) -> ActionLists:
    """As many forwards as there are stages after this one, then one backward for each forward."""
    lists = []
    for rank in range(ranks):
        forward = [Action("F", rank, m) for m in range(microbatches)]
        backward = [Action("B", rank, m) for m in range(microbatches)]
        lists.append(alternate(forward, backward, ranks - rank - 1))
    return loop(ranks, ranks), lists


def alternate(forward: list[Action], backward: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then forward and backward in turn, then the remaining backwards."""
    warmup = min(warmup, len(forward))
    steady = [a for pair in zip(forward[warmup:], backward, strict=False) for a in pair]
    return forward[:warmup] + steady + backward[len(forward) - warmup :]


SCHEDULE = ScheduleEntry(
    name="1f1b",
    description="each backward as early as possible, so that few activations are held",
    build=build,
    bubble=lambda shares, ranks, count: 1.0,
    in_flight=lambda ranks, stages, rank, count: ranks - rank,
    allowed_stages=(1,),
    searched_stages=(1,),
)
