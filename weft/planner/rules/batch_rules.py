"""Rules of the batch: the global batch, microbatches and accumulation."""

from __future__ import annotations

from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.planner.rules.arithmetic import divisors, nearest


def batch_rule(job: Job, plan: Plan) -> str | None:
    """The data-parallel ranks divide the global batch."""
    batch = job.train.global_batch
    if batch % plan.dp == 0:
        return None
    up, down = -(-batch // plan.dp) * plan.dp, batch // plan.dp * plan.dp
    fit = f"{down} or {up}" if down else str(up)
    return f"train.global_batch={batch} is not a multiple of the {plan.dp} data-parallel ranks; {fit} would work"


def ramp_rule(job: Job, plan: Plan) -> str | None:
    """Every batch of train.batch_ramp is divided among the data-parallel ranks, and fills a pipeline's microbatches."""
    if not job.train.batch_ramp:
        return None
    if job.train.sync.entry.starts_processes:
        return f"train.batch_ramp does not support train.sync={job.train.sync.mode}; leave batch_ramp out"
    for size in job.train.ramp.sizes[:-1]:
        if size % plan.dp:
            near = -(-size // plan.dp) * plan.dp
            return (
                f"train.batch_ramp has batches of {size} sequences, which {plan.dp} data-parallel ranks do not divide; "
                f"{near} would work"
            )
        if plan.pp > 1 and size // plan.dp < plan.accumulation:
            return (
                f"train.batch_ramp has batches of {size} sequences, {size // plan.dp} for each data-parallel rank, but "
                f"the pipeline has {plan.accumulation} microbatches; {plan.accumulation * plan.dp} would work"
            )
    return None


def drop_last_rule(job: Job, plan: Plan) -> str | None:
    """data.drop_last ends epochs with batches of one size, which every rank reads."""
    if not job.data.drop_last:
        return None
    if job.data.mixture or job.data.shuffle != "samples" or job.data.buckets:
        plain = "data.bucket=true" if job.data.buckets else f"data.shuffle={job.data.shuffle}"
        what = "data.mixture" if job.data.mixture else plain
        return f"data.drop_last=true and {what}, which has epochs of its own; leave drop_last out"
    if job.train.batch_ramp:
        return (
            "data.drop_last=true ends an epoch with a whole batch, and train.batch_ramp changes its size; leave one out"
        )
    if job.train.sync.entry.starts_processes:
        return f"data.drop_last=true does not support train.sync={job.train.sync.mode}; leave drop_last out"
    return None


def metrics_rule(job: Job, plan: Plan) -> str | None:
    """Metrics compare a model's outputs, which no rank has whole under tp and pp."""
    wanted = [name for name in job.train.metrics if name != "perplexity"]
    if job.model.module or not wanted or plan.tp == plan.pp == 1:
        return None
    axis = f"parallel.tp={plan.tp}" if plan.tp > 1 else f"parallel.pp={plan.pp}"
    return f"train.metrics={wanted[0]} needs a model's whole outputs, which {axis} splits; tp=1, pp=1 would work"


def microbatch_rule(job: Job, plan: Plan) -> str | None:
    """microbatch × accumulation is a rank's share of the global batch."""
    if batch_rule(job, plan):
        return None
    share = job.train.global_batch // plan.dp
    given, accumulation, setting = job.train.microbatch, job.train.accumulation, "train.accumulation"
    if job.parallel != "auto" and job.parallel.microbatches != "auto":
        if accumulation not in ("auto", job.parallel.microbatches):
            return (
                f"parallel.microbatches={job.parallel.microbatches} and train.accumulation={accumulation} are the same "
                "setting; leave one of them out"
            )
        accumulation, setting = job.parallel.microbatches, "parallel.microbatches"
    if isinstance(given, int) and isinstance(accumulation, int) and given * accumulation != share:
        return (
            f"train.microbatch={given} × {setting}={accumulation} is not the {share} sequences of a rank "
            f"(global_batch {job.train.global_batch} / {plan.dp} ranks); leave one of them out"
        )
    for name, value in (("train.microbatch", given), (setting, accumulation)):
        if isinstance(value, int) and share % value:
            fit = nearest(value, divisors(share))
            return (
                f"{name}={value} does not divide the {share} sequences of a rank (global_batch "
                f"{job.train.global_batch} / {plan.dp} ranks); {name.partition('.')[2]}={fit} would work"
            )
    return None
