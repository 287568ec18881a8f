"""Rules of tensor parallelism."""

from __future__ import annotations

from weft.job.data import PAD_MULTIPLE
from weft.job.schema import Job, Model
from weft.planner.plan import Plan
from weft.planner.rules.arithmetic import divisors, either
from weft.planner.rules.context_rules import attends


def heads_rule(job: Job, plan: Plan) -> str | None:
    """tp divides the attention heads, and the key and value heads or their parts."""
    heads, kv = job.model.heads, job.model.kv_heads
    if plan.tp == 1 or not attends(job) or not heads or not kv:
        return None
    fit = [d for d in divisors(heads) if heads_fit(job.model, d)]
    if heads % plan.tp:
        return f"parallel.tp={plan.tp} does not divide model.heads={heads}; tp={either(fit)} would work"
    if heads_fit(job.model, plan.tp):
        return None
    return (
        f"parallel.tp={plan.tp} and model.kv_heads={kv} of head_dim={job.model.head_dim}: each rank has whole key and "
        f"value heads, or an equal part of one; tp={either(fit)} would work"
    )


def heads_fit(model: Model, tp: int) -> bool:
    """Whether each rank of tp has whole query heads, and whole key and value heads or an equal part of one."""
    heads, kv = model.heads or 0, model.kv_heads or 0
    return heads % tp == 0 and (kv % tp == 0 or (tp % kv == 0 and kv * (model.head_dim or 0) % tp == 0))


def padding_rule(job: Job, plan: Plan) -> str | None:
    """tp divides the lengths of padded batches where it cuts them."""
    if not plan.sequence or not job.data.pads_batches or PAD_MULTIPLE % plan.tp == 0:
        return None
    return (
        f"parallel.tp={plan.tp} does not divide {PAD_MULTIPLE}, to a multiple of which batches of "
        f"data.format={job.data.format} are padded; tp={either(divisors(PAD_MULTIPLE))} or parallel.sequence=false "
        "would work"
    )


def width_rule(job: Job, plan: Plan) -> str | None:
    """tp divides the feed-forward width."""
    ffn = job.model.ffn if not job.model.takes_vectors else job.model.dim
    if plan.tp == 1 or not ffn or ffn % plan.tp == 0:
        return None
    name = "model.ffn" if not job.model.takes_vectors else "model.dim"
    up = -(-ffn // plan.tp) * plan.tp
    return f"{name}={ffn} is not a multiple of parallel.tp={plan.tp}; {name}={up} would work"
