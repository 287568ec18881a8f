"""The result of `weft plan`: the winner, runner-ups and their differences, the Pareto front, cost and energy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.job.errors import FitError, JobError
from weft.job.schema import Job
from weft.planner.advice.goodput import Goodput, goodput
from weft.planner.advice.other_settings import Gain, gains_of_other_settings
from weft.planner.advice.why import compare, reasons
from weft.planner.calibration import Calibration
from weft.planner.estimator import make_estimator
from weft.planner.job_estimate import POWER_OVERHEAD, POWER_SHARE, estimate_job
from weft.planner.make_plan import PlanStart, best_plan, complete_or_advise, complete_plan
from weft.planner.own_calibration import own_calibration
from weft.planner.plan import Plan
from weft.planner.rules.known_rules import RUNNABLE
from weft.planner.search.branch_and_bound import LayoutSearch, SearchResult
from weft.planner.search.candidates import Layouts
from weft.planner.search.choose import find_open, keep_pinned, plan_space
from weft.planner.time.step import Estimates

NODE_FRACTIONS = (1, 2, 4, 8)
"""The front also includes the same run on this many times fewer nodes."""
MAX_FRONT_POINTS = 24
"""Most points of the front that are listed."""
SEARCHED_FIELDS = (
    "dp_replicate", "dp_shard", "zero", "tp", "sequence", "cp", "pp", "ep", "schedule", "virtual_stages", "microbatch",
    "accumulation", "recompute", "offload", "precision", "compression", "placement",
)  # fmt: skip
"""Plan fields that the search chooses."""


@dataclass(frozen=True)
class Point:
    """One layout of the list or the front, and its difference from the winner."""

    plan: Plan
    nodes: int
    step_time_s: float
    """Effective step time, with failures and checkpoints."""
    raw_step_time_s: float
    """Step time without failures and checkpoints."""
    peak_gib: float
    usd: float | None
    """Of the whole run."""
    kwh: float
    lacks: str = ""

    def to_json(self) -> dict[str, Any]:
        p = self.plan
        return {
            "layout": p.layout(), "nodes": self.nodes, "world": p.world,
            **{name: getattr(p, name) for name in SEARCHED_FIELDS},
            "step_time_s": self.raw_step_time_s, "effective_step_time_s": self.step_time_s,
            "peak_memory_gib": self.peak_gib, "cost_usd": self.usd, "energy_kwh": self.kwh, "lacks": self.lacks,
        }  # fmt: skip


@dataclass(frozen=True)
class Survey:
    """Everything that `weft plan` reports for one of Weft's models."""

    job: Job
    plan: Plan
    start: PlanStart
    search: LayoutSearch
    found: SearchResult
    estimate: dict[str, Any]
    """The winner's estimate, as `weft estimate` gives it."""
    goodput: Goodput
    runner_ups: tuple[Point, ...] = ()
    front: tuple[Point, ...] = ()
    untrainable: tuple[str, ...] = ()
    """Why this version cannot train the winner."""
    gains: tuple[Gain, ...] = ()
    """Gains of settings that the job does not use."""

    @property
    def fits(self) -> bool:
        return len(self.found) > 0

    def to_json(self) -> dict[str, Any]:
        found = self.found
        return {
            "job": self.job.model_dump(mode="json"), **self.plan.to_json(), "fits": self.fits,
            "estimate": {k: v for k, v in self.estimate.items() if k != "sources"}, "goodput": self.goodput.to_json(),
            "search": {"candidates": found.size, "estimated": found.estimated},
            "candidates": [p.to_json() for p in self.runner_ups], "pareto": [p.to_json() for p in self.front],
            "trains": not self.untrainable, "beyond": [g.to_json() for g in self.gains],
        }  # fmt: skip


def survey(
    start: PlanStart, top: int = 5, front: bool = True, beyond: bool = True, calibration: Calibration | None = None
) -> Survey:
    """Search a job's layouts; a JobError where no layout divides its batch and ranks. With `beyond`, also search with
    settings that the job does not use."""
    job, plan = start.job, start.plan
    calibration = calibration or own_calibration(job, start.device)
    estimator = make_estimator(job, start.plan, start.world, start.device, start.memory_gib, calibration)
    space = plan_space(job, plan, start.world)
    search = LayoutSearch(space, estimator)
    if search.size == 0:
        best_plan(start, calibration)  # says which of the job's settings rules every layout out
        raise JobError(
            f"no layout shares train.global_batch={job.train.global_batch} among {start.world} ranks; "
            f"a multiple of {start.world} would work"
        )
    found = find_open(job, plan, search, top, front)
    why = reasons(search, found, pinned=job.parallel != "auto") if len(found) else []
    winner = found.layouts if len(found) else found.smallest
    _, chosen = complete_or_advise(start, keep_pinned(job, plan, winner.plan(0, plan)), why, estimator)
    estimate = estimate_job(job, chosen, calibration)
    if len(found) == 0:
        return Survey(job, chosen, start, search, found, estimate, _goodput(job, chosen, 1.0))
    kept = _goodput(job, chosen, estimate["step_time_s"])
    first, *rest = (placed(start, found, int(i)) for i in found.best(top))
    others = [_point(start, found, *each, compare(first[1], each[1])) for each in rest if each and first]
    others.sort(key=lambda point: point.raw_step_time_s)
    refused = tuple(text for rule in RUNNABLE if (text := rule(job, chosen)))
    gains = tuple(gains_of_other_settings(search, found)) if beyond else ()
    made = Survey(job, chosen, start, search, found, estimate, kept, tuple(others), (), refused, gains)
    return replace(made, front=_front(made, calibration)) if front else made


def _goodput(job: Job, plan: Plan, step_time_s: float) -> Goodput:
    from weft.planner.model.counts import count_parameters

    counts = count_parameters(job.model)
    parameters = counts.total if counts else 0
    return goodput(job.cluster.failures, plan.world, plan.nodes, parameters, step_time_s, job.checkpoint.background)


def run_cost(start: PlanStart, found: SearchResult, seconds: float, world: int) -> tuple[float | None, float]:
    """USD and kWh of a whole run at this step time."""
    cluster = found.estimator.cluster
    hours = seconds * start.job.train.full_steps / 3600
    price = start.job.cluster.price_usd_hour
    price = cluster.price_usd_hour if price is None else price
    kwh = world * float(cluster.watts) * POWER_SHARE * POWER_OVERHEAD * hours / 1000
    return (None if price is None else price * world * hours), kwh


def placed(start: PlanStart, found: SearchResult, i: int) -> tuple[Plan, Estimates] | None:
    """Layout i and its estimate, with the homes of its states; None where these do not fit."""
    plan = replace(found.layouts.plan(i, start.plan), nodes=start.job.cluster.nodes)
    if not plan.tiered:
        return plan, found.estimator.estimate(found.layouts.take([i]))
    try:
        plan = complete_plan(start, keep_pinned(start.job, start.plan, plan), ())[1]
    except (FitError, JobError):
        return None
    estimator = make_estimator(
        start.job, plan, start.world, start.device, start.memory_gib, found.estimator.calibration
    )
    return plan, estimator.estimate(Layouts.one(plan))


def _point(start: PlanStart, found: SearchResult, plan: Plan, made: Estimates, lacks: str = "") -> Point:
    raw = float(made.step_time_s[0])
    seconds = raw / _goodput(start.job, plan, raw).share
    usd, kwh = run_cost(start, found, seconds, plan.world)
    return Point(plan, plan.nodes, seconds, raw, float(made.peak_gib[0]), usd, kwh, lacks)


def on_fewer_nodes(start: PlanStart, times: int) -> PlanStart | None:
    """The same run on this many times fewer nodes; None where they do not divide."""
    nodes = start.job.cluster.nodes
    if nodes % times or start.job.parallel != "auto":
        return None
    cluster = start.job.cluster.model_copy(update={"nodes": nodes // times})
    plan = replace(start.plan, nodes=nodes // times)
    return replace(start, job=start.job.model_copy(update={"cluster": cluster}), world=start.world // times, plan=plan)


def _front(made: Survey, calibration: Calibration) -> tuple[Point, ...]:
    """The Pareto front in time, memory, cost and energy, on all nodes and on fewer."""
    points: list[Point] = []
    for times in NODE_FRACTIONS:
        start = made.start if times == 1 else on_fewer_nodes(made.start, times)
        if start is None:
            continue
        if times == 1:
            found = made.found
        else:
            estimator = make_estimator(start.job, start.plan, start.world, start.device, start.memory_gib, calibration)
            search = LayoutSearch(plan_space(start.job, start.plan, start.world), estimator)
            found = find_open(start.job, start.plan, search)
        if len(found):
            made_here = (placed(start, found, i) for i in _front_indices(found))
            points += [_point(start, found, *each) for each in made_here if each]
    return tuple(_sample_front(pareto_points(points)))


def _front_indices(found: SearchResult) -> list[int]:
    """Indices of a search's own front of time and memory."""
    order = np.lexsort((found.peaks, found.times))
    low = np.minimum.accumulate(found.peaks[order])
    step = np.concatenate([[True], low[1:] < low[:-1]])
    return [int(i) for i in order[step] if found.times[i] <= 2 * found.times[order[0]]]


def pareto_points(points: Sequence[Point]) -> list[Point]:
    """The points that no other dominates, the fastest first."""
    values = np.array([[p.step_time_s, p.peak_gib, p.usd or 0.0, p.kwh] for p in points]).reshape(-1, 4)
    kept = []
    for i, own in enumerate(values):
        no_worse = (values <= own * (1 + 1e-9)).all(axis=1)
        better = (values < own * (1 - 1e-9)).any(axis=1)
        if not (no_worse & better).any():
            kept.append(points[i])
    return sorted(kept, key=lambda p: (p.step_time_s, p.peak_gib))


def _sample_front(points: list[Point]) -> list[Point]:
    if len(points) <= MAX_FRONT_POINTS:
        return points
    chosen = np.unique(np.linspace(0, len(points) - 1, MAX_FRONT_POINTS).round().astype(int))
    return [points[i] for i in chosen]
