"""Several kinds of devices in one run: uneven shares of the batch, or uneven pipeline stages, whichever is faster.

Uneven shares: each kind trains replicas (or shards) of the model in its own best layout, on as many sequences as it can
process in the same time; gradients are averaged between the kinds over the network. Uneven stages: one pipeline spans
both kinds, and the slower kind gets fewer blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.hardware.catalog import find_device
from weft.job.schema import Job
from weft.planner.calibration import Calibration
from weft.planner.estimator import make_estimator
from weft.planner.make_plan import PlanStart, start_plan
from weft.planner.model.cluster_facts import UNKNOWN_TFLOPS
from weft.planner.search.branch_and_bound import LayoutSearch, SearchResult
from weft.planner.search.choose import plan_space

BALANCE_ROUNDS = 6
"""Iterations in which the shares are updated from the measured speeds."""
INTERPOLATED_TRIES = 3
"""Splits of the blocks that are guessed from the seconds of a block, before the rest is halved."""


@dataclass(frozen=True)
class Part:
    """The part of one kind of device."""

    device: str
    ranks: int
    layout: str
    sequences: int
    """Its share of the global batch; all of it with uneven stages."""
    blocks: int
    """Its blocks of the model; all of them with uneven shares."""
    seconds: float
    peak_gib: float

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device, "ranks": self.ranks, "layout": self.layout, "sequences": self.sequences,
            "blocks": self.blocks, "seconds": self.seconds, "peak_memory_gib": self.peak_gib,
        }  # fmt: skip


@dataclass(frozen=True)
class Mixed:
    """A plan over several kinds of devices."""

    way: str
    step_time_s: float
    parts: tuple[Part, ...]
    alone_s: float
    """The best step time of one kind alone."""

    def to_json(self) -> dict[str, Any]:
        return {
            "way": self.way, "step_time_s": self.step_time_s, "parts": [p.to_json() for p in self.parts],
            "one_kind_alone_s": self.alone_s if math.isfinite(self.alone_s) else None,
        }  # fmt: skip


def kinds(start: PlanStart) -> list[PlanStart]:
    """Each kind of device as a cluster of its own."""
    first = _alone(start.job, device=start.device.name, devices_per_node=start.world // start.job.cluster.nodes)
    others = [
        _alone(start.job, device=find_device(group.device, start.job.cluster.catalog).name, nodes=group.nodes,
               devices_per_node=group.devices_per_node, memory_gib=group.memory_gib)
        for group in start.job.cluster.also
    ]  # fmt: skip
    return [start_plan(job.model_copy(update={"precision": start.plan.precision})) for job in (first, *others)]


def _alone(job: Job, **changed: Any) -> Job:
    cluster = job.cluster.model_copy(update={"also": [], **changed})
    return job.model_copy(update={"cluster": cluster, "parallel": "auto"})


def mixed(start: PlanStart, calibration: Calibration) -> list[Mixed]:
    """Ways to use all kinds at once, the fastest first; empty if none fits."""
    each = kinds(start)
    times = [_time(_best(s, s.job.train.global_batch, calibration)) for s in each]
    ways = [_shares(each, calibration, min(times))]
    if len(each) == 2:
        ways.append(_stages(each, calibration, times))
    return sorted((way for way in ways if way is not None), key=lambda way: way.step_time_s)


def _time(found: SearchResult | None) -> float:
    return float(found.times[0]) if found is not None and len(found) else float("inf")


def _best(start: PlanStart, batch: int, calibration: Calibration, blocks: int | None = None) -> SearchResult | None:
    if batch < 1:
        return None
    train = start.job.train.model_copy(update={"global_batch": batch})
    model = start.job.model.model_copy(update={"layers": blocks}) if blocks else start.job.model
    job = start.job.model_copy(update={"train": train, "model": model})
    estimator = make_estimator(job, start.plan, start.world, start.device, start.memory_gib, calibration)
    search = LayoutSearch(plan_space(job, start.plan, start.world), estimator)
    return search.find() if search.size else None


def _shares(each: list[PlanStart], calibration: Calibration, alone: float) -> Mixed | None:
    """Shares of the batch in proportion to the speed of each kind, iterated."""
    batch = each[0].job.train.global_batch
    unit = [s.world for s in each]  # its ranks divide the share evenly
    speed = np.array([s.world * (s.device.tflops_of(s.plan.precision) or UNKNOWN_TFLOPS) for s in each])
    best: Mixed | None = None
    tried = list[list[int]]()
    for _ in range(BALANCE_ROUNDS):
        shares = _rounded(batch, speed / speed.sum(), unit)
        if shares is None or shares in tried:
            return best
        tried.append(shares)
        found = [_best(s, n, calibration) for s, n in zip(each, shares, strict=True)]
        if any(f is None or len(f) == 0 for f in found):
            return best
        times = np.array([_time(f) for f in found])
        step = float(times.max()) + _between(found, each)
        parts = tuple(
            _part(s, f, n, int(s.job.model.layers or 0)) for s, f, n in zip(each, found, shares, strict=True) if f
        )
        if best is None or step < best.step_time_s:
            best = Mixed("uneven shares of the batch", step, parts, alone)
        speed = np.array(shares) / times
    return best


def _rounded(batch: int, share: Any, unit: list[int]) -> list[int] | None:
    """Shares that add up to the batch, each divisible by its ranks."""
    sizes = [max(1, round(batch * float(s) / u)) * u for s, u in zip(share, unit, strict=True)]
    sizes[0] = batch - sum(sizes[1:])
    return sizes if sizes[0] > 0 else None


def _between(found: list[SearchResult | None], each: list[PlanStart]) -> float:
    """Time to average gradients between the kinds, sharded over all ranks, over the slowest network."""
    model = found[0].estimator.model if found[0] else None
    if model is None:
        return 0.0
    slowest = min(float(f.estimator.cluster.levels[-1].gb_s) * s.world for f, s in zip(found, each, strict=True) if f)
    return float(2 * model.parameters * 4 / (slowest * 1e9))


def _part(start: PlanStart, found: SearchResult, sequences: int, blocks: int) -> Part:
    layout = found.layouts.plan(0, start.plan).layout()
    return Part(start.device.name, start.world, layout, sequences, blocks, float(found.times[0]), float(found.peaks[0]))


def _stages(each: list[PlanStart], calibration: Calibration, alone: list[float]) -> Mixed | None:
    """Blocks in proportion to speed: one pipeline over both kinds, each in the best layout for its blocks. `alone` are
    the step times of each kind with all blocks."""
    layers, batch = int(each[0].job.model.layers or 0), each[0].job.train.global_batch
    low, high, tried = 1, layers - 1, 0
    best: Mixed | None = None
    counts, times = (layers, layers), alone
    while low <= high:  # the first kind slows down with each block, the other speeds up
        blocks = _balanced(layers, counts, times, low, high) if tried < INTERPOLATED_TRIES else (low + high) // 2
        counts, tried = (blocks, layers - blocks), tried + 1
        found = [_best(s, batch, calibration, n) for s, n in zip(each, counts, strict=True)]
        times = [_time(f) for f in found]
        if max(times) < float("inf") and found[0] and found[1]:
            # both parts work on different microbatches at once; the first and the last wait for each other once
            waits = max(times) / max(1, int(found[0].layouts.accumulation[0]))
            step = max(times) + waits
            parts = tuple(_part(s, f, batch, n) for s, f, n in zip(each, found, counts, strict=True) if f)
            if best is None or step < best.step_time_s:
                best = Mixed("uneven stages of a pipeline", step, parts, min(alone))
        if times[0] > times[1]:
            high = blocks - 1
        else:
            low = blocks + 1
    return best


def _balanced(layers: int, counts: tuple[int, int], times: list[float], low: int, high: int) -> int:
    """Blocks of the first kind with which both take as long, if each block takes as long as those of `counts` did."""
    first, other = (seconds / count for seconds, count in zip(times, counts, strict=True))
    if not math.isfinite(first + other):
        return (low + high) // 2
    return min(high, max(low, round(layers * other / (first + other))))
