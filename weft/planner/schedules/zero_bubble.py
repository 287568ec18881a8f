"""zero-bubble: ZB-H1 with one stage per rank, ZBV with two."""

from __future__ import annotations

from dataclasses import replace

from weft.planner.schedules import zb_h1, zbv
from weft.planner.schedules.entry import ActionLists


def build(ranks: int, microbatches: int, stages_per_rank: int) -> ActionLists:
    """The lists of the schedule that this name resolves to."""
    return (zbv if stages_per_rank == 2 else zb_h1).build(ranks, microbatches, stages_per_rank)


SCHEDULE = replace(
    zb_h1.SCHEDULE,
    name="zero-bubble",
    description="zb-h1 with one stage per rank, zbv with two",
    build=build,
    allowed_stages=(1, 2),
    searched_stages=(),
    stands_for={1: "zb-h1", 2: "zbv"},
)
