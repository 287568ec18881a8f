"""Rules of optimizers."""

from __future__ import annotations

from weft.job.schema import Job
from weft.planner.plan import Plan


def lr_scaling_rule(job: Job, plan: Plan) -> str | None:
    """The rule of lars and lamb relies on their trust ratios."""
    if job.optim.scale_lr != "lars" or job.optim.name in ("lars", "lamb"):
        return None
    return (
        f"optim.scale_lr=lars scales the rate of lars and lamb, and optim.name is {job.optim.name}; "
        "scale_lr=sqrt would work"
    )


def layer_decay_rule(job: Job, plan: Plan) -> str | None:
    """Layer-wise rates need an optimizer whose weights are all on the device, on every rank."""
    decay = job.optim.layer_decay
    if decay == 1:
        return None
    if plan.tiered:
        return f"optim.layer_decay={decay:g} does not support memory.offload or memory.states; leave one of them out"
    if job.train.sync.entry.starts_processes:
        return f"optim.layer_decay={decay:g} does not support train.sync={job.train.sync.mode}; leave one of them out"
    return None
