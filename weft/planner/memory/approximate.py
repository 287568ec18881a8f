"""Memory and traffic of layouts that no walk through tensors knows yet: context parallel, chunks, parts recomputed."""

from __future__ import annotations

from weft.job.optim import OPTIMIZERS, Optim
from weft.job.schema import Job, Model
from weft.planner.engine_constants import LOGITS_BYTES
from weft.planner.memory.layouts_memory import microbatches_in_flight
from weft.planner.memory.recompute import block_elements, kept_elements, recomputed_share
from weft.planner.model.counts import count_parameters
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts
from weft.planner.time.context import context_bytes

GIB = 2**30


def rough_memory(job: Job, plan: Plan) -> dict[str, float]:
    """GiB by part; empty for a person's own module, whose size is not known before it is built."""
    counts = count_parameters(job.model)
    if counts is None:
        return {}
    parameters = counts.total / plan.tp / plan.pp
    unit = max(counts.block, counts.embedding + counts.head) / plan.tp
    compute = 4 if plan.precision == "fp32" else 2
    shard = plan.dp_shard * plan.cp if plan.dp_shard > 1 else 1
    states = parameters * (4 + 4 + optimizer_bytes(job.optim)) / shard
    if plan.dp_shard == 1:
        gathered = parameters * (compute if plan.precision != "fp32" else 0)
    elif plan.zero == 3:
        gathered = 2 * unit * compute
    else:
        gathered = parameters * compute
    whole_gradients = parameters * 4 if shard > 1 and plan.zero == 1 else 0
    tokens = plan.microbatch * (1 if job.model.is_stack else job.data.seq_len) / plan.cp
    at_once = float(microbatches_in_flight(Layouts.one(plan), 0)[0])
    kept = activation_bytes(job.model, compute, plan, at_once) * tokens
    kept -= min(plan.host_gib * GIB, at_once * kept_bytes(job.model, compute, plan) * tokens)
    held = 3 * 4 * tokens * (job.model.vocab or 0) / plan.tp  # logits, their exponentials, their gradient
    logits = 0 if job.model.is_stack else min(3 * LOGITS_BYTES[plan.device], held)
    return {
        "states_gib": states / GIB,
        "gathered_gib": (gathered + whole_gradients) / GIB,
        "activations_gib": (kept + logits) / GIB,
    }


def optimizer_bytes(optim: Optim) -> int:
    """Bytes of optimizer state a parameter."""
    return 4 * OPTIMIZERS[optim.name].state_per_parameter(optim)


def activation_bytes(model: Model, compute: int, plan: Plan, at_once: float = 1.0) -> float:
    """Bytes kept for the backward pass, a token, over this rank's layers and the microbatches that wait at once."""
    layers = (model.layers or 0) / plan.pp
    dim = model.dim or 0
    if model.is_stack:
        return at_once * layers * 2 * dim * compute / plan.tp
    if plan.long:  # what every block keeps, and one block's shards whole
        heads, kv = ((n or 0) * (model.head_dim or 0) for n in (model.heads, model.kv_heads))
        return at_once * kept_bytes(model, compute, plan) + (6 * dim + 4 * heads + 4 * kv) * compute / plan.tp
    one = kept_elements(model, plan.recompute, layers)
    again = block_elements(model) if recomputed_share(plan.recompute, model) else 0.0  # one block is computed again
    return ((one - again) * at_once + again) * compute / plan.tp


def kept_bytes(model: Model, compute: int, plan: Plan) -> float:
    """Of a long sequence's token: each block's input and its attention's output, which may be parked in the host."""
    heads = (model.heads or 0) * (model.head_dim or 0)
    return (model.layers or 0) / plan.pp * ((model.dim or 0) + heads) * compute / plan.tp


def rough_traffic(job: Job, plan: Plan) -> dict[str, float]:
    """Bytes one rank hands to collectives in a step, by axis."""
    counts = count_parameters(job.model)
    if counts is None:
        return {}
    parameters = counts.total / plan.tp / plan.pp
    compute = 4 if plan.precision == "fp32" else 2
    out: dict[str, float] = {}
    if plan.cp > 1:
        share = plan.microbatch * plan.accumulation * job.data.seq_len
        out["cp"] = sum(context_bytes(job.model, plan, share, compute).values())
        if plan.dp_shard == 1:
            out["cp"] += 4 * parameters
    if plan.dp_shard > 1:
        gathers = {1: 1, 2: 1, 3: 2 * plan.accumulation}[plan.zero]
        scatters = 1 if plan.zero == 1 else plan.accumulation
        out["dp_shard"] = parameters * (gathers * compute + scatters * 4)
    if plan.dp_replicate > 1 and (plan.dp_shard > 1 or plan.cp == 1):
        out["dp_replicate"] = 4 * parameters / (plan.dp_shard * plan.cp)
    if plan.tp > 1 and not job.model.is_stack:
        tokens = plan.microbatch * plan.accumulation * job.data.seq_len / plan.cp
        times = 8 + 4 * recomputed_share(plan.recompute, job.model)  # two gathers and two sums a block, each pass
        out["tp"] = times * (job.model.layers or 0) / plan.pp * tokens * (job.model.dim or 0) * compute
    if plan.pp > 1:
        width = 1 if job.model.is_stack else job.data.seq_len / plan.cp / (plan.tp if plan.sequence else 1)
        sent = plan.microbatch * plan.accumulation * width * (job.model.dim or 0) * compute
        out["pp"] = 2 * plan.virtual_stages * sent  # activations on, gradients back
    return out
