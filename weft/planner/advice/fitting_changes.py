"""Changes of a job that would make it fit into memory: each is tried, and the cheapest are listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from weft.hardware.catalog import DEVICES
from weft.job.errors import FitError, JobError
from weft.job.schema import Job
from weft.planner.calibration import Calibration
from weft.planner.estimator import make_estimator
from weft.planner.make_plan import PlanStart, complete_plan, start_plan
from weft.planner.own_calibration import own_calibration
from weft.planner.search.branch_and_bound import LayoutSearch
from weft.planner.search.choose import keep_pinned, plan_space
from weft.planner.search.survey import run_cost

Idea = tuple[str, Job]
MIN_SHARE = 0.5
"""With n times the nodes no layout needs less than this, over n, of what the smallest one needs now."""


@dataclass(frozen=True)
class Change:
    """One change of the job, and the run with it."""

    what: str
    """As written on the command line."""
    step_time_s: float
    peak_gib: float
    limit_gib: float
    usd: float | None
    kwh: float

    def to_json(self) -> dict[str, Any]:
        return {
            "change": self.what, "step_time_s": self.step_time_s, "peak_memory_gib": self.peak_gib,
            "memory_limit_gib": self.limit_gib, "cost_usd": self.usd, "energy_kwh": self.kwh,
        }  # fmt: skip


def changes(start: PlanStart, calibration: Calibration, needs_gib: float, number: int = 3) -> list[Change]:
    """The `number` cheapest changes that make a job fit, by cost, or by energy without prices. `needs_gib` is the
    memory of its smallest layout."""
    works: list[Change] = []
    rest: list[Change] = []
    for group in _ideas(start, needs_gib / calibration.usable):
        # a group is ordered from small changes to large
        tries = (_try(start, what, job, calibration) for what, job in group)
        tried = sorted(islice((change for change in tries if change), number), key=_cost)
        works += tried[:1]
        rest += tried[1:]
    few = max(0, number - len(works))  # if few kinds of change help, list more of the same kind
    return sorted([*works, *sorted(rest, key=_cost)[:few]], key=_cost)[:number]


def _cost(change: Change) -> tuple[bool, float]:
    return change.usd is None, change.kwh if change.usd is None else change.usd


def _try(start: PlanStart, what: str, job: Job, calibration: Calibration) -> Change | None:
    try:
        tried = start_plan(job)
    except (FitError, JobError):
        return None
    if tried.device != start.device:
        calibration = own_calibration(job, tried.device)
    space = plan_space(tried.job, tried.plan, tried.world)
    estimator = make_estimator(tried.job, tried.plan, tried.world, tried.device, tried.memory_gib, calibration)
    found = LayoutSearch(space, estimator).find()
    if len(found) == 0:
        return None
    try:
        complete_plan(tried, keep_pinned(tried.job, tried.plan, found.layouts.plan(0, tried.plan)), [], estimator)
    except (FitError, JobError):
        return None
    seconds = float(found.times[0])
    # the same number of tokens, in shorter sequences
    usd, kwh = run_cost(tried, found, seconds * start.job.data.seq_len / tried.job.data.seq_len, tried.world)
    return Change(what, seconds, float(found.peaks[0]), estimator.limit_gib, usd, kwh)


def _ideas(start: PlanStart, needs_gib: float) -> Iterator[list[Idea]]:
    """Groups of changes, of which the best is listed: the text of each change, and the changed job. `needs_gib` is the
    memory of a device on which the smallest layout would fit."""
    nodes, world = start.job.cluster.nodes, start.world
    given = start_plan(start.job).world != world  # by --nproc, which must change with the nodes
    job = _with(start.job, "cluster", devices_per_node=world // nodes)
    free = job.model_copy(update={"parallel": "auto"})

    def more(like: Job, words: str = "") -> list[Idea]:
        made = []
        helpful = [times for times in (2, 4, 8, 16, 32, 64, 128) if MIN_SHARE * needs_gib / times <= start.memory_gib]
        for n in (nodes * times for times in helpful):
            ranks = f" --nproc {world // nodes * n}" if given else ""
            made.append((f"{words}cluster.nodes={n}{ranks}", _with(like, "cluster", nodes=n)))
        return made

    if job.parallel != "auto":
        yield [("parallel=auto", free)]
        yield more(free, "parallel=auto ")
        yield [(f"parallel.zero={z}", _with(job, "parallel", zero=z)) for z in (2, 3) if z > job.parallel.zero]
    if job.memory.recompute != "auto":
        yield [("memory.recompute=full", _with(job, "memory", recompute="full"))]
    if job.train.microbatch not in ("auto", 1) or job.train.accumulation != "auto":
        single = _with(job, "train", microbatch=1, accumulation="auto")
        also = "" if job.train.accumulation == "auto" else " train.accumulation=auto"
        yield [(f"train.microbatch=1{also}", single)]
    if start.plan.precision == "fp32" and start.plan.device != "cpu":
        yield [("precision=bf16", job.model_copy(update={"precision": "bf16"}))]
    if job.memory.offload == "none":
        yield [("memory.offload=activations", _with(job, "memory", offload="activations"))]
    if job.memory.activations == "exact":
        again = "auto" if job.memory.recompute == "selective" else job.memory.recompute
        also = " memory.recompute=auto" if again != job.memory.recompute else ""
        stored = _with(job, "memory", activations="fp8", recompute=again)
        yield [(f"memory.activations=fp8{also}", stored)]
    yield more(job)
    least = max(1.02 * start.memory_gib, needs_gib if job.parallel == "auto" else 0.0)
    larger = [d for d in DEVICES if d.kind == start.device.kind and d.memory_gib >= least]
    larger.sort(key=lambda device: device.memory_gib)
    also = "" if job.cluster.memory_gib is None else " cluster.memory_gib=null"
    yield [(f"cluster.device={d.name}{also}", _with(job, "cluster", device=d.name, memory_gib=None)) for d in larger]
    shorter = [n for n in (2**k for k in range(20, 8, -1)) if n < job.data.seq_len]
    yield [(f"data.seq_len={n}", _with(job, "data", seq_len=n)) for n in shorter]


def _with(job: Job, section: str, **changed: Any) -> Job:
    return job.model_copy(update={section: getattr(job, section).model_copy(update=changed)})
