"""The layout of each tower of parallel.towers: its ranks and degrees."""

from __future__ import annotations

from typing import Any

from weft.job.errors import JobError
from weft.job.parallel import TowerLayout
from weft.planner.rules.arithmetic import asked_ranks, divisors


def tower_rows(towers: dict[str, TowerLayout], world: int) -> tuple[dict[str, Any], ...]:
    """A row of the plan for each tower: its first rank, number of ranks, and the degree of every axis."""
    return tuple(_row(name, layout, world) for name, layout in towers.items())


def _row(name: str, layout: TowerLayout, world: int) -> dict[str, Any]:
    first, end = layout.first_and_end or (0, world)
    if end > world:
        raise JobError(
            f"parallel.towers.{name}.ranks={layout.ranks} goes beyond the {world} ranks there are; ranks are from 0 to "
            f"{world - 1} (--nproc {end} starts more)"
        )
    count, degrees = end - first, {axis: getattr(layout, axis) for axis in ("dp_replicate", "dp_shard", "tp")}
    if degrees["dp_shard"] == -1 and "dp_replicate" not in layout.model_fields_set:
        degrees["dp_replicate"] = 1
    rest = [axis for axis, degree in degrees.items() if degree == -1]
    if len(rest) > 1:
        raise JobError(f"parallel.towers.{name}: {rest[0]} and {rest[1]} are both -1; only one can take the rest")
    product, words = asked_ranks(degrees)
    if count % product or (not rest and product != count):
        fit = [d for d in divisors(count) if d <= product]
        raise JobError(
            f"parallel.towers.{name} asks for {words} = {product} ranks, and has {count}; a product of "
            f"{fit[-1] if rest else count} would work"
        )
    if rest:
        degrees[rest[0]] = count // product
    wide = {axis: degree for axis, degree in degrees.items() if degree > 1}
    zero = {"dp_shard": f" (zero {layout.zero})"}
    text = " × ".join(f"{axis} {degree}{zero.get(axis, '')}" for axis, degree in wide.items()) or "1 rank"
    on = "" if count == world else f" on rank{'s' if count > 1 else ''} {first}{f'-{end - 1}' if count > 1 else ''}"
    return {
        "name": name,
        "first": first,
        "ranks": count,
        **degrees,
        "zero": layout.zero,
        "layout": f"{name}: {text}{on}",
    }
