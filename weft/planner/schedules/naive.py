"""The naive schedule: one microbatch at a time, so that only one rank works at any moment."""

from __future__ import annotations

from weft.planner.schedules.actions import Action, loop
from weft.planner.schedules.entry import ActionLists, ScheduleEntry


def build(ranks: int, microbatches: int, stages_per_rank: int) -> ActionLists:
    """Each microbatch passes forward through all stages and back before the next one starts."""
    lists: list[list[Action]] = []
    for rank in range(ranks):
        own = range(rank, ranks * stages_per_rank, ranks)
        lists.append([])
        for m in range(microbatches):
            lists[-1] += [Action("F", s, m) for s in own]
            lists[-1] += [Action("B", s, m) for s in reversed(own)]
    return loop(ranks, ranks * stages_per_rank), lists


SCHEDULE = ScheduleEntry(
    name="naive",
    description="one microbatch at a time, forward and back; one rank works while the others wait",
    build=build,
    bubble=lambda shares, ranks, count: count,
    in_flight=lambda ranks, stages, rank, count: 1.0,
)
