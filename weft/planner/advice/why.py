"""Reasons for a layout: what each choice gains over the best layout without it, found by searching again."""

from __future__ import annotations

from typing import Any

from weft.planner.number_format import gib, gib_difference, percent, relative_difference, seconds
from weft.planner.schedules.known_schedules import SCHEDULE_NAMES
from weft.planner.search.branch_and_bound import LayoutSearch, SearchResult
from weft.planner.search.candidates import RECOMPUTES, Layouts
from weft.planner.search.frontier import TIME_TOLERANCE, complexity
from weft.planner.time.step import Estimates

AXES = ("pp", "tp", "cp", "ep")
TIME_WORDS = {
    "compute": "computing", "tp": "tensor-parallel traffic", "cp": "context-parallel traffic", "ep": "expert traffic",
    "pp_bubble": "filling and draining the pipeline", "pp_send": "messages between stages",
    "dp": "gradient and weight traffic",
    "optimizer": "the optimizer", "offload": "copies to the host", "host": "the host",
    "waiting": "waiting for the slowest", "data": "data",
}  # fmt: skip
"""Names of the parts of a step's time."""


def reasons(search: LayoutSearch, found: SearchResult, pinned: bool = False) -> list[str]:
    """A sentence for each choice that is not the simplest one."""
    one = found.layouts.take([0])
    best, limit = float(found.times[0]), found.estimator.limit_gib
    sentences = (
        [] if pinned else [*_axes(search, one, best, limit), *_data(search, one, best, limit, float(found.peaks[0]))]
    )
    sentences += _recompute(search, one, best, limit)
    return sentences if pinned else [*sentences, *_schedule(search, one, best, limit), *_unused(search, one, best)]


def _unused(search: LayoutSearch, one: Layouts, best: float) -> list[str]:
    """Step time of layouts with the axes that the best layout does not use."""
    words = []
    for axis in AXES:
        only: dict[str, Any] = {axis: tuple(d for d in getattr(search.space, axis) if d > 1)}
        if int(getattr(one, axis)[0]) > 1 or not only[axis]:
            continue
        other = search.find(**only)
        if len(other):
            words.append(f"{axis} (best {slower_or_faster(float(other.times.min()), best)})")
        elif other.size:
            words.append(f"{axis} (none fits)")
    return [f"left out: {', '.join(words)}"] if words else []


def _instead(search: LayoutSearch, best: float, limit: float, **only: Any) -> str | None:
    """The disadvantage of the best layout under a condition; None if it has none."""
    fine = only.pop("fine", None)
    other = search.find(fine=fine, **only)
    if len(other) == 0:
        if other.size == 0:
            return None
        return f"would need {gib(other.smallest_gib)} of {gib(limit)} GiB"
    fastest = int(other.times.argmin())
    return f"would be {slower_or_faster(float(other.times[fastest]), best)} ({short(other.layouts, fastest)})"


def slower_or_faster(time: float, best: float) -> str:
    """A step time compared with the chosen layout's. Of the same search, one that is faster is within the tolerance."""
    gap = relative_difference(time, best)
    if gap >= 0:
        return f"{percent(gap)} slower" if gap else "as fast"
    if gap < -TIME_TOLERANCE:
        return f"{percent(-gap)} faster"
    return f"{percent(-gap)} faster, within the tolerance of {100 * TIME_TOLERANCE:g} %, but less simple"


def _axes(search: LayoutSearch, one: Layouts, best: float, limit: float) -> list[str]:
    sentences = []
    for axis in AXES:
        degree = int(getattr(one, axis)[0])
        if degree == 1 or (axis == "ep" and not search.space.experts):
            continue
        lacks = _instead(search, best, limit, **{axis: (1,)})
        sentences.append(
            f"{axis} {degree}: without it a step {lacks}" if lacks else f"{axis} {degree}: needed by the batch"
        )
    return sentences


def _data(search: LayoutSearch, one: Layouts, best: float, limit: float, peak: float) -> list[str]:
    shard, replicate, zero = int(one.dp_shard[0]), int(one.dp_replicate[0]), int(one.zero[0])
    if shard == 1:
        if replicate == 1:
            return []
        return [f"dp_replicate {replicate}: a whole copy and its activations take {gib(peak)} of {gib(limit)} GiB, "
                "and replicas communicate least"]  # fmt: skip
    lacks = _instead(search, best, limit, dp_shard=(1,))
    sentences = [f"dp_shard {shard} (zero {zero}): whole copies {lacks or 'would not divide the batch'}"]
    if zero > 1 and (lacks := _instead(search, best, limit, dp_shard=(shard,), zero=tuple(range(1, zero)))):
        sentences.append(f"zero {zero}: a lower stage {lacks}")
    if replicate > 1 and (lacks := _instead(search, best, limit, dp_replicate=(1,))):
        sentences.append(f"dp_replicate {replicate}: one group of shards {lacks}")
    return sentences


def _recompute(search: LayoutSearch, one: Layouts, best: float, limit: float) -> list[str]:
    code, blocks = int(one.recompute[0]), int(one.recompute_blocks[0])
    space = search.space
    if code == 0 or len(space.recompute) == 1:
        return []
    same = {a: (int(getattr(one, a)[0]),) for a in ("pp", "tp", "cp", "dp_shard", "dp_replicate", "zero", "microbatch")}
    fine = space.restricted(recompute=space.recompute[: space.recompute.index(RECOMPUTES[code])], by_block=False)
    lacks = _instead(search, best, limit, fine=fine, **same)
    what = f"{blocks} blocks" if blocks >= 0 else RECOMPUTES[code]
    return [f"recompute {what}: with less the same layout {lacks}"] if lacks else []


def _schedule(search: LayoutSearch, one: Layouts, best: float, limit: float) -> list[str]:
    name = SCHEDULE_NAMES[int(one.schedule[0])]
    if int(one.pp[0]) == 1 or name == "1f1b":
        return []
    same = {a: (int(getattr(one, a)[0]),) for a in ("pp", "tp", "cp", "dp_shard", "dp_replicate")}
    lacks = _instead(search, best, limit, fine=search.space.restricted(schedules=(("1f1b", (1,)),)), **same)
    return [f"{name}: 1f1b with the same degrees {lacks}"] if lacks else []


def compare(chosen: Estimates, other: Estimates) -> str:
    """A layout compared with the best: its time and, where that is about the same, its memory and complexity."""
    best, time = float(chosen.step_time_s[0]), float(other.step_time_s[0])
    gap = relative_difference(time, best)
    if gap >= TIME_TOLERANCE:
        parts = {name: float(v[0] - chosen.time[name][0]) for name, v in other.time.items()}
        worst = max(parts, key=lambda name: parts[name])
        return f"{percent(gap)} slower: {seconds(parts[worst])} more in {TIME_WORDS.get(worst, worst)}"
    words = [slower_or_faster(time, best)]
    more = gib_difference(float(other.peak_gib[0]), float(chosen.peak_gib[0]))
    if more:
        words.append(f"needs {gib(abs(more))} GiB {'more' if more > 0 else 'less'}")
    steps = complexity(Layouts.join([chosen.layouts, other.layouts]))
    if gap >= 0 and steps[1] > steps[0]:
        words.append("less simple")
    return ", ".join(words)


def short(layouts: Layouts, i: int) -> str:
    """The short form of a layout."""
    return layouts.plan(i).layout()
