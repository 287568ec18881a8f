"""The knee of a Pareto front, and rows that are nearly the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weft.planner.advice.compromise import against_fastest, folded, knee
from weft.planner.search.survey import Point


def point(seconds: float, gib: float, world: int = 8) -> Point:
    plan: Any = SimpleNamespace(world=world)
    return Point(plan, 1, seconds, seconds, gib, usd=seconds * world, kwh=seconds * world / 2)


FRONT = [point(10.0, 80.0), point(10.2, 78.0), point(11.0, 40.0), point(11.3, 38.5), point(20.0, 38.0)]


def test_rows_that_are_nearly_the_same_are_one() -> None:
    groups = folded(FRONT)
    assert [(group.point.step_time_s, group.others) for group in groups] == [(10.0, 1), (11.0, 1), (20.0, 0)]
    assert sum(len(group.members) for group in groups) == len(FRONT)
    fewer = [*FRONT[:1], point(10.0, 80.0, world=4)]
    assert len(folded(fewer)) == 2, "another number of ranks is another choice"


def test_the_knee_is_where_more_memory_buys_little_time() -> None:
    best = knee(FRONT)
    assert best is FRONT[2]
    assert against_fastest(best, FRONT) == "10 % slower, 50 % less memory"
    assert knee(FRONT[:2]) is None
    cheap = point(12.0, 40.0, world=4)
    assert "40 % less energy and money" in against_fastest(cheap, FRONT)
