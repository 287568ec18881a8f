"""`weft plan --why-not`: the best form of a named layout compared with the chosen one."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np

from weft.job.errors import JobError
from weft.planner.advice.why import TIME_WORDS, slower_or_faster
from weft.planner.number_format import counted, gib, gib_difference, relative_difference, seconds
from weft.planner.plan import AXES
from weft.planner.rules.arithmetic import divisors, either
from weft.planner.rules.known_rules import TP_RULES
from weft.planner.rules.layout_syntax import parse_layout
from weft.planner.schedules.known_schedules import SCHEDULE_NAMES, SCHEDULES, check_schedule
from weft.planner.search.branch_and_bound import LayoutSearch
from weft.planner.search.space import job_space
from weft.planner.search.survey import Survey, placed
from weft.planner.time.step import Estimates

SETTINGS = ("dp_replicate", "dp_shard", "zero", "tp", "cp", "pp", "ep", "microbatch")


def why_not(made: Survey, text: str) -> dict[str, Any]:
    """The reason against a layout: a rule, its memory, or its time. Axes that are not named stay open."""
    named = _named(text)
    only: dict[str, Any] = {name: (value,) for name, value in named.items() if name in SETTINGS}
    answer: dict[str, Any] = {"asked": text, "settings": named}
    if broken := _broken(made, named):
        return {**answer, "verdict": "cannot be", "because": broken}
    if "microbatches" in named:
        only["accumulation"] = (named["microbatches"],)
    search = _open(made, named)
    space = search.space
    if not space.experts:
        only.pop("ep", None)
    if named.get("dp_shard") == 1:  # nothing is sharded, whatever the stage
        only.pop("zero", None)
    if "schedule" in named or "virtual_stages" in named:
        space = space.restricted(schedules=_schedules(named))
    if named.get("cp_style") in space.cp_style:
        space = space.restricted(cp_style=(named["cp_style"],))
    if "recompute" in named:
        space = space.restricted(recompute=(named["recompute"],), by_block=False)
    found = search.find(fine=space, beside=float(made.found.times.min()) if made.fits else None, **only)
    if found.size == 0:
        return {**answer, "verdict": "cannot be", "because": _no_product(made, named)}
    if len(found) == 0:
        need, limit = found.smallest_gib, search.estimator.limit_gib
        parts = search.estimator.estimate(found.smallest, detail=True).memory
        worst = max(parts, key=lambda name: float(np.ravel(parts[name])[0]))
        most = float(np.ravel(parts[worst])[0])
        because = f"its smallest form, {found.smallest.plan(0).layout()}, needs {gib(need)} GiB of {gib(limit)}: "
        because += f"{gib(gib_difference(need, limit))} too much; its largest part is {worst}, {gib(most)}"
        return {**answer, "verdict": "does not fit", "peak_memory_gib": need, "because": because}
    if not made.fits:
        return {**answer, "verdict": "fits", "because": f"{found.layouts.plan(0).layout()} would fit"}
    chosen, other = (placed(made.start, each, 0) for each in (made.found, found))
    if chosen is None or other is None:
        because = "its states do not fit into the memories that memory.offload may use"
        return {**answer, "verdict": "does not fit", "because": because}
    return {**answer, **_beside(chosen[1], other[1], other[0].layout())}


def _beside(chosen: Estimates, other: Estimates, layout: str) -> dict[str, Any]:
    best, time, peak = float(chosen.step_time_s[0]), float(other.step_time_s[0]), float(other.peak_gib[0])
    gap = relative_difference(time, best)
    facts = {"layout": layout, "step_time_s": time, "peak_memory_gib": peak, "slower": gap}
    if gap == 0:
        return {**facts, "verdict": "as fast", "because": f"{layout} takes {seconds(time)}, as long as the chosen one"}
    parts = {name: float(v[0] - chosen.time[name][0]) for name, v in other.time.items()}
    order = sorted(parts, key=lambda name: -parts[name])
    more = [f"{seconds(parts[n])} more in {TIME_WORDS.get(n, n)}" for n in order[:2] if parts[n] > 0.02 * best]
    less = [f"{seconds(-parts[n])} less in {TIME_WORDS.get(n, n)}" for n in order[-1:] if parts[n] < -0.02 * best]
    because = f"its best form, {layout}, takes {seconds(time)} a step and {gib(peak)} GiB, "
    because += f"{slower_or_faster(time, best)}: " + ", ".join([*more, *less])
    return {**facts, "verdict": "slower" if gap > 0 else "faster", "because": because.rstrip(": ")}


def _named(text: str) -> dict[str, Any]:
    """The settings that were written, without defaults."""
    rest = text.lower().replace(",", " ")
    named: dict[str, Any] = {}
    for name, pattern in (
        ("recompute", r"recompute\s*=?\s*(none|selective|full)"),
        ("microbatch", r"microbatch\s*=?\s*(\d+)"),
    ):
        if found := re.search(pattern, rest):
            named[name] = found.group(1) if name == "recompute" else int(found.group(1))
            rest = rest.replace(found.group(0), " ")
    if not rest.strip():
        if not named:
            raise JobError("--why-not names no layout; write for example --why-not 'tp=8 pp=2'")
        return named
    section = parse_layout(rest)
    # parse_layout sets data-parallel axes that were not named to 1; here they stay open
    kept = {k: v for k, v in section.items() if k not in ("dp_replicate", "dp_shard") or v > 1 or k in rest}
    if "zero" in section and "dp_shard" in kept and not re.search(r"dp_shard|shard|fsdp\s*\d|hsdp", rest):
        kept.pop("dp_shard")  # `zero3` alone names the stage, not a degree
    return {**kept, **named}


def _schedules(named: dict[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The schedules that may be meant, each with its possible stages per rank."""
    schedule = named.get("schedule")
    names = SCHEDULE_NAMES if schedule is None else tuple(SCHEDULES[schedule].stands_for.values()) or (schedule,)
    stages = (named["virtual_stages"],) if "virtual_stages" in named else tuple(range(1, 9))
    return tuple((n, tuple(s for s in stages if s in (SCHEDULES[n].allowed_stages or stages))) for n in names)


def _open(made: Survey, named: dict[str, Any]) -> LayoutSearch:
    """The search to use: the survey's, or one over all layouts if that excludes the named one."""
    job, plan, space = made.job, made.start.plan, made.search.space
    everything = job_space(job, made.start.world, plan.precision)
    if (cp := named.get("cp", 1)) not in everything.cp and everything.heads:
        everything = everything.restricted(cp=(cp,))
    left_out = [axis for axis in ("pp", "tp", "cp", "ep") if named.get(axis, 1) not in getattr(space, axis)]
    if job.parallel == "auto" and not left_out and space.dp is None:
        return made.search
    return LayoutSearch(everything, made.search.estimator)


def _broken(made: Survey, named: dict[str, Any]) -> str | None:
    degrees = {k: v for k, v in named.items() if k in ("tp", "cp", "pp", "ep")}
    for name in (*AXES, "ep", "microbatch", "microbatches", "virtual_stages"):
        if named.get(name, 1) < 1:
            return f"{name}={named[name]} is less than 1"
    if named.get("zero", 1) not in (1, 2, 3):
        return f"zero={named['zero']} is not a stage of ZeRO; 1, 2 or 3 would work"
    batch = made.job.train.global_batch
    for name in ("microbatch", "microbatches"):
        if batch % named.get(name, 1):
            return f"train.global_batch={batch} is not a multiple of {name}={named[name]}"
    schedule, stages = named.get("schedule", "1f1b"), named.get("virtual_stages")
    if "schedule" in named and (problem := check_schedule(schedule, named.get("pp", 1), 1, stages)):
        return problem
    if named.get("ep", 1) > 1 and made.job.model.experts is None:
        return f"ep={named['ep']} distributes experts, and the model has none"
    tried = replace(made.plan, dp_replicate=1, dp_shard=1, **{"tp": 1, "cp": 1, "pp": 1, **degrees})
    broken = [text for rule in TP_RULES if (text := rule(made.job, tried))]
    if not broken or "tp" not in degrees:
        return broken[0] if broken else None
    problem, _, advice = broken[0].rpartition("; ")
    works = [
        d for d in divisors(made.start.world) if not any(rule(made.job, replace(tried, tp=d)) for rule in TP_RULES)
    ]
    return f"{problem}; tp={either(works)} would work" if advice.startswith("tp=") else broken[0]


def _no_product(made: Survey, named: dict[str, Any]) -> str:
    product = math.prod(named.get(axis, 1) for axis in AXES)
    world, batch = made.start.world, made.job.train.global_batch
    if world % product:
        axes = [axis for axis in AXES if named.get(axis, 1) > 1]
        problem = f"its degrees multiply to {product}, which does not divide {world} ranks"
        if len(axes) > 1:
            return f"{problem}; {max(d for d in divisors(world) if d <= product)} would"
        near = max(d for d in divisors(world) if d <= product and _broken(made, {**named, axes[0]: d}) is None)
        return f"{problem}; {axes[0]}={near} would work"
    dp = int(named.get("dp_replicate", 1) * named.get("dp_shard", 1))
    if batch % dp:
        return f"train.global_batch={batch} does not divide among {dp} data-parallel ranks"
    parts, stages = (made.job.model.layers or 0) + 2, named.get("pp", 1) * named.get("virtual_stages", 1)
    if stages > parts:
        blocks = counted(parts - 2, "block")
        return f"{stages} stages cannot be made of {parts} parts: {blocks}, the embedding and the head"
    return f"no layout of {world} ranks and {batch} sequences has it: a batch, a head or a stage would not divide"
