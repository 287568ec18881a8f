"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""

from __future__ import annotations

from weft.planner.schedules.actions import Action, loop
from weft.planner.schedules.entry import ActionLists, ScheduleEntry


def build(ranks: int, microbatches: int, stages_per_rank: int) -> ActionLists:
    """All forwards of a rank, then all its backwards."""
    lists = []
    for rank in range(ranks):
        own = range(rank, ranks * stages_per_rank, ranks)
        forward = [Action("F", s, m) for s in own for m in range(microbatches)]
        lists.append(forward + [Action("B", s, m) for s in reversed(own) for m in range(microbatches)])
    return loop(ranks, ranks * stages_per_rank), lists


# never searched: 1f1b takes as long and holds fewer activations
SCHEDULE = ScheduleEntry(
    name="gpipe",
    description="all forwards, then all backwards",
    build=build,
    bubble=lambda shares, ranks, count: 1.0,
    in_flight=lambda ranks, stages, rank, count: count,
)
