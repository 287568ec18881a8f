"""What the planner asks about the modes `server` and `federated`: bytes that a worker sends, and what is refused."""

from __future__ import annotations

from weft.job.optim import OPTIMIZERS
from weft.job.schema import Job
from weft.planner.plan import Plan


def server_bytes(job: Job, plan: Plan, parameters: float) -> dict[str, float]:
    """Gradients go to the server, and weights come back."""
    return {"server": 8.0 * parameters}


def federated_bytes(job: Job, plan: Plan, parameters: float) -> dict[str, float]:
    """Weights and updates; with more than one step in a round the optimizer state too."""
    sync = job.train.sync
    sends_state = plan.sync_every > 1 and not sync.clip and not sync.secure
    state = 4 + 8 * OPTIMIZERS[job.optim.name].state_per_parameter(job.optim) if sends_state else 0
    return {"server": ((12.0 if sync.secure else 8.0) + state) * parameters / plan.sync_every}


def server_rule(job: Job, plan: Plan) -> str | None:
    """Why a parameter server cannot be used with other settings of a job."""
    gather = job.train.sync.gather
    if gather and plan.dp % gather:
        fit = max(d for d in range(1, min(gather, plan.dp) + 1) if plan.dp % d == 0)
        return (
            f"train.sync.gather={gather} does not divide the {plan.dp} shares of a global batch; "
            f"gather={fit} would work"
        )
    if job.train.ema:
        return f"train.ema={job.train.ema:g} needs the weights of every step in one place; ema=0 would work"
    return None


def federated_rule(job: Job, plan: Plan) -> str | None:
    """Why federated averaging cannot be used with other settings of a job."""
    drawn, batch = job.train.sync.drawn, job.train.global_batch
    if batch % drawn:
        up = -(-batch // drawn) * drawn
        return f"train.global_batch={batch} is not a multiple of the {drawn} clients of a round; {up} would work"
    if job.train.ema:
        return f"train.ema={job.train.ema:g} needs the weights of every step in one place; ema=0 would work"
    return None
