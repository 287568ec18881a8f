"""Rules of optimizers."""

from __future__ import annotations

from weft.job.schema import Job
from weft.planner.plan import Plan


def layer_decay_rule(job: Job, plan: Plan) -> str | None:
    """Layer-wise rates need an optimizer whose weights are all on the device, on every rank."""
    decay = job.optim.layer_decay
    if decay == 1:
        return None
    if plan.tiered:
        return f"optim.layer_decay={decay:g} does not support memory.offload or memory.states; leave one of them out"
    if job.train.sync.mode in ("server", "federated"):
        return f"optim.layer_decay={decay:g} does not support train.sync={job.train.sync.mode}; leave one of them out"
    return None
