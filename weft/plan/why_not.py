"""Why not this layout: the best form of what a person names, beside the winner."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from weft.plan.layouts import Layouts
from weft.plan.parse import parse_layout
from weft.plan.rules import RULES, divisors
from weft.plan.search import Bounds
from weft.plan.survey import Survey
from weft.plan.why import TIME_WORDS, gib, percent, seconds

SETTINGS = ("dp_replicate", "dp_shard", "zero", "tp", "cp", "pp", "ep", "microbatch")


def why_not(made: Survey, text: str) -> dict[str, Any]:
    """What stands against a layout: a rule, its memory, or where its time goes. Axes that are not named stay open."""
    named = _named(text)
    only: dict[str, Any] = {name: (value,) for name, value in named.items() if name in SETTINGS}
    answer: dict[str, Any] = {"asked": text, "settings": named}
    if broken := _broken(made, named):
        return {**answer, "verdict": "cannot be", "because": broken}
    bounds = _open(made)
    space = bounds.space
    if "schedule" in named:
        stages = (named["virtual_stages"],) if "virtual_stages" in named else tuple(range(1, 9))
        space = space.restricted(schedules=((named["schedule"], stages),))
    if "recompute" in named:
        space = space.restricted(recompute=(named["recompute"],), by_block=False)
    found = bounds.find(fine=space, **only)
    if found.size == 0:
        return {**answer, "verdict": "cannot be", "because": _no_product(made, named)}
    if len(found) == 0:
        need, limit = found.least_gib, bounds.scene.limit_gib
        parts = bounds.scene.estimate(found.frugal).memory
        worst = max(parts, key=lambda name: float(np.ravel(parts[name])[0]))
        most = float(np.ravel(parts[worst])[0])
        because = f"its most frugal form, {found.frugal.plan(0).layout()}, needs {gib(need)} GiB of {gib(limit)}: "
        because += f"{gib(need - limit)} too many, {gib(most)} of them {worst}"
        return {**answer, "verdict": "does not fit", "peak_memory_gib": need, "because": because}
    if not made.fits:
        return {**answer, "verdict": "fits", "because": f"{found.layouts.plan(0).layout()} would fit"}
    return {**answer, **_beside(made, found.layouts.take([0]))}


def _beside(made: Survey, other: Layouts) -> dict[str, Any]:
    both = made.found.scene.estimate(Layouts.join([made.found.layouts.take([0]), other]))
    times, peaks = np.asarray(both.step_time_s), np.asarray(both.peak_gib)
    gap = float(times[1] / times[0] - 1)
    layout = other.plan(0).layout()
    facts = {"layout": layout, "step_time_s": float(times[1]), "peak_memory_gib": float(peaks[1]), "slower": gap}
    if abs(gap) < 0.005:
        return {
            **facts,
            "verdict": "as fast",
            "because": f"{layout} takes {seconds(float(times[1]))}, the winner as long",
        }
    parts = {name: float(v[1] - v[0]) for name, v in both.time.items() if np.ndim(v)}
    order = sorted(parts, key=lambda name: -parts[name])
    more = [f"{seconds(parts[n])} more in {TIME_WORDS.get(n, n)}" for n in order[:2] if parts[n] > 0.02 * times[0]]
    less = [f"{seconds(-parts[n])} less in {TIME_WORDS.get(n, n)}" for n in order[-1:] if parts[n] < -0.02 * times[0]]
    word = "slower" if gap > 0 else "faster"
    because = f"its best form, {layout}, takes {seconds(float(times[1]))} a step and {gib(float(peaks[1]))} GiB, "
    because += f"{percent(abs(gap))} {word}: " + ", ".join([*more, *less])
    return {**facts, "verdict": word, "because": because.rstrip(": ")}


def _named(text: str) -> dict[str, Any]:
    """The settings a person wrote, and no others."""
    rest = text.replace(",", " ")
    named: dict[str, Any] = {}
    for name, pattern in (
        ("recompute", r"recompute\s*=?\s*(none|selective|full)"),
        ("microbatch", r"microbatch\s*=?\s*(\d+)"),
    ):
        if found := re.search(pattern, rest):
            named[name] = found.group(1) if name == "recompute" else int(found.group(1))
            rest = rest.replace(found.group(0), " ")
    if not rest.strip():
        return named
    section = parse_layout(rest)
    # parse_layout says 1 for the data-parallel axes that were not named; here those stay open
    said = {k: v for k, v in section.items() if k not in ("dp_replicate", "dp_shard") or v > 1 or k in rest}
    if "zero" in section and "dp_shard" in said and not re.search(r"dp_shard|shard|fsdp\s*\d|hsdp", rest):
        said.pop("dp_shard")  # `zero3` alone names the stage, not a degree
    return {**said, **named}


def _open(made: Survey) -> Bounds:
    """The bounds to look in: those of the survey, or of everything where the job pinned its layout."""
    if made.job.parallel == "auto":
        return made.bounds
    from weft.plan.choose import space_for

    free = made.job.model_copy(update={"parallel": "auto"})
    return Bounds(space_for(free, made.start.plan, made.start.world, False), made.bounds.scene)


def _broken(made: Survey, named: dict[str, Any]) -> str | None:
    from dataclasses import replace

    degrees = {k: v for k, v in named.items() if k in ("tp", "cp", "pp", "ep")}
    tried = replace(made.plan, dp_replicate=1, dp_shard=1, **{"tp": 1, "cp": 1, "pp": 1, **degrees})
    said = [text for rule in RULES if rule.__name__.startswith("_tp") and (text := rule(made.job, tried))]
    return said[0] if said else None


def _no_product(made: Survey, named: dict[str, Any]) -> str:
    product = int(np.prod([named.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp")]))
    world, batch = made.start.world, made.job.train.global_batch
    if world % product:
        near = max(d for d in divisors(world) if d <= product)
        return f"its degrees multiply to {product}, which does not divide {world} ranks; {near} would"
    dp = int(named.get("dp_replicate", 1) * named.get("dp_shard", 1))
    if batch % dp:
        return f"train.global_batch={batch} does not divide among {dp} data-parallel ranks"
    return f"no layout of {world} ranks and {batch} sequences has it: a batch, a head or a stage would not divide"
