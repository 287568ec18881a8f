"""A job's plan for as many ranks as are left: the layout that was asked for if it fits, else the nearest that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from weft.job.errors import FitError, JobError
from weft.job.schema import Job
from weft.planner import RUNNABLE, Plan, check, check_fits, make_plan

Prepare = Callable[[Job, int], tuple[Job, Plan]]


def prepare_plan(job: Job, world: int) -> tuple[Job, Plan]:
    """Plan for so many ranks, and refuse what cannot run."""
    job, plan = make_plan(job, world)
    check(job, plan, RUNNABLE)
    check_fits(job, plan)
    return job, plan


def replan(job: Job, ranks: int, nodes: int, prepare: Prepare = prepare_plan) -> tuple[Job, Plan]:
    """The plan on the most ranks that can be used, at most so many; batch, samples and rate are never touched."""
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
    """The job, then changes of its layout from small to large."""
    yield job
    free = _with(job, "train", microbatch="auto", accumulation="auto")
    if job.parallel != "auto":
        replicas = job.parallel.dp_replicate != 1 and job.parallel.dp_shard in (1, -1)
        data, other = ("dp_replicate", "dp_shard") if replicas else ("dp_shard", "dp_replicate")
        open_data = {"microbatches": "auto", "split": None, data: -1, **({other: 1} if replicas else {})}
        yield _with(job, "parallel", **open_data)
        free = _with(free, "parallel", **open_data)
        yield free
        for axis in (other, "pp", "cp", "tp"):  # what is given up last is what needs the fastest links
            free = _with(free, "parallel", **{axis: 1})
            yield free
    yield free.model_copy(update={"parallel": "auto"})


def _with(job: Job, section: str, **changed: Any) -> Job:
    return job.model_copy(update={section: getattr(job, section).model_copy(update=changed)})
