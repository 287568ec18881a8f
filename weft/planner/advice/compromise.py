"""Reading a Pareto front: points that are nearly the same, and the best compromise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.planner.search.survey import Point

ALIKE = 0.08
"""Points whose time, memory and cost differ by no more than this share are shown as one."""


@dataclass(frozen=True)
class AlikePoints:
    """Points of the front that are nearly the same, the fastest first."""

    members: tuple[Point, ...]

    @property
    def point(self) -> Point:
        return self.members[0]

    @property
    def others(self) -> int:
        return len(self.members) - 1


def folded(front: Sequence[Point]) -> list[AlikePoints]:
    """The front in groups of points that are nearly the same as the fastest of the group."""
    groups: list[AlikePoints] = []
    for point in front:
        for i, group in enumerate(groups):
            if _alike(group.point, point):
                groups[i] = AlikePoints((*group.members, point))
                break
        else:
            groups.append(AlikePoints((point,)))
    return groups


def _alike(a: Point, b: Point) -> bool:
    return a.plan.world == b.plan.world and all(
        abs(math.log(x / y)) <= ALIKE for x, y in zip(_figures(a), _figures(b), strict=True)
    )


def knee(front: Sequence[Point]) -> Point | None:
    """The point that is nearest to the least time, memory and device time at once; None for fewer than three points.

    Each figure is measured on a logarithmic scale from its best to its worst value on the front. Money and energy are
    proportional to device time.
    """
    if len(front) < 3:
        return None
    columns = list(zip(*(_figures(point) for point in front), strict=True))
    scales = [(min(column), max(column)) for column in columns]

    def distance(point: Point) -> float:
        shares = [
            math.log(value / best) / math.log(worst / best)
            for value, (best, worst) in zip(_figures(point), scales, strict=True)
            if worst > best
        ]
        return math.hypot(*shares)

    return min(front, key=distance)


def _figures(point: Point) -> tuple[float, float, float]:
    return point.step_time_s, point.peak_gib, point.step_time_s * point.plan.world


def against_fastest(point: Point, front: Sequence[Point]) -> str:
    """What a point gives up against the fastest, and gains."""
    fastest = front[0]
    parts = [f"{100 * (point.step_time_s / fastest.step_time_s - 1):.0f} % slower"]
    parts += [f"{100 * (1 - point.peak_gib / fastest.peak_gib):.0f} % less memory"]
    if point.plan.world != fastest.plan.world:
        parts.append(f"{100 * (1 - point.kwh / fastest.kwh):.0f} % less energy and money")
    return ", ".join(parts)
