"""Re-plan a job for the ranks that are left: the requested layout if it fits, else the nearest that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from weft.job.errors import FitError, JobError
from weft.job.schema import Job
from weft.planner import RUNNABLE, Plan, check, check_fits, make_plan

Prepare = Callable[[Job, int], tuple[Job, Plan]]


def prepare_plan(job: Job, world: int) -> tuple[Job, Plan]:
    """Plan for `world` ranks and refuse what cannot run."""
    job, plan = make_plan(job, world)
    check(job, plan, RUNNABLE)
    check_fits(job, plan)
    return job, plan


def replan(job: Job, ranks: int, nodes: int, prepare: Prepare = prepare_plan) -> tuple[Job, Plan]:
    """The plan on the most ranks that can be used, at most `ranks`; batch, samples and learning rate stay the same."""
    job = _with(job, "cluster", nodes=nodes, devices_per_node="auto")
    first: JobError | FitError | None = None
    for world in range(ranks, 0, -1):
        for tried in nearest(job):
            try:
                return prepare(tried, world)
            except (JobError, FitError) as error:
                first = first or error
    assert first is not None
    raise first


def nearest(job: Job) -> Iterator[Job]:
    """The job, then variants of its layout from the smallest change to the largest."""
    yield job
    free = _with(job, "train", microbatch="auto", accumulation="auto")
    if job.parallel != "auto":
        replicas = job.parallel.dp_replicate != 1 and job.parallel.dp_shard in (1, -1)
        data, other = ("dp_replicate", "dp_shard") if replicas else ("dp_shard", "dp_replicate")
        open_data = {"microbatches": "auto", "split": None, data: -1, **({other: 1} if replicas else {})}
        yield _with(job, "parallel", **open_data)
        free = _with(free, "parallel", **open_data)
        yield free
        for axis in (other, "pp", "cp", "tp"):  # the axes that need the fastest links come last
            free = _with(free, "parallel", **{axis: 1})
            yield free
    yield free.model_copy(update={"parallel": "auto"})


def _with(job: Job, section: str, **changed: Any) -> Job:
    return job.model_copy(update={section: getattr(job, section).model_copy(update=changed)})
