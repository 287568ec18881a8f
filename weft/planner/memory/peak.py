"""The peak of one rank's memory in a step, counted in tensors: its states, and a walk through its units' passes.

`weft dryrun` traces the same; bench/memory.py holds it beside real ranks.
"""

from __future__ import annotations

from weft.job.optim import OPTIMIZERS
from weft.job.schema import Job
from weft.job.shapes import PATCH_DIM
from weft.planner.memory.rank_bytes import (
    FP32_BYTES,
    compute_bytes,
    gradients_stay_low_precision,
    rank_shards,
    states_of,
)
from weft.planner.memory.step_trace import Step, Walk
from weft.planner.model.parameters import coords_of, param_shards, stages_of
from weft.planner.plan import Plan
from weft.planner.time.compression import residual_of


def peak_parts(job: Job, plan: Plan, rank: int = 0) -> dict[str, float]:
    """Bytes at the peak: parameters, gradients, optimizer, and the rest, which comes and goes within a step."""
    states = states_of(job, plan, rank)
    if states is None:
        return {}
    lasting: float = states.parameters + states.copies + states.optimizer + states.average
    lasting += residual_of(plan, [p for stage in rank_shards(job, plan, rank) for p in stage])
    buckets = (
        plan.dp_shard == 1
        and (plan.dp_replicate > 1 or plan.precision != "fp32")
        and not gradients_stay_low_precision(plan)
    )
    walk = Walk(lasting + (states.gradients if buckets else 0) + plan.accumulation * batch_bytes(job, plan))
    Step(job, plan, rank, walk, buckets).run()
    after = max(_optimizer_flash(job, plan, rank), _partial_flash(job, plan, rank))
    walk.peak = max(walk.peak, lasting + states.gradients + after)
    return {
        "parameters": states.parameters + states.copies + states.average,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "working": walk.peak - states.total,
        "gathered": _gathered(job, plan, rank),
        "peak": walk.peak,
    }


def _gathered(job: Job, plan: Plan, rank: int) -> float:
    """Weights that shards must hold whole at once: all of them, or those of two blocks and of what is outside."""
    if plan.dp_shard == 1:
        return 0.0
    coords = coords_of(plan, rank)
    units: dict[tuple[int, str], float] = {}
    for stage in stages_of(plan, coords["pp"]):
        for p in param_shards(job.model, plan, stage, coords):
            key = (stage, p.weight.unit)
            units[key] = units.get(key, 0.0) + p.gathered * compute_bytes(plan)
    if plan.zero < 3:
        return sum(units.values())
    outside = max((size for (_, unit), size in units.items() if not unit), default=0.0)
    return outside + 2 * max((size for (_, unit), size in units.items() if unit), default=0.0)


def peak_of(job: Job, plan: Plan, rank: int = 0) -> float:
    """The peak in bytes; 0 for a module of a person's own."""
    return peak_parts(job, plan, rank).get("peak", 0.0)


def batch_bytes(job: Job, plan: Plan) -> float:
    """One microbatch of data: ids, inputs, targets, valid and, where documents are masked, theirs."""
    model, size, seq = job.model, plan.microbatch, job.data.seq_len
    if model.is_stack:
        return size * (8 + 2 * FP32_BYTES * (model.dim or 0) + 1)
    if model.is_classifier:
        return size * (8 + FP32_BYTES * seq * PATCH_DIM + 8 + 1)
    return size * (8 + seq * (8 + 8 + 1 + (16 if job.data.mask_documents else 0)))


def _partial_flash(job: Job, plan: Plan, rank: int) -> float:
    """Gradients that are summed over tp after the last pass travel together (parallel/spread_model.py)."""
    if plan.tp == 1:
        return 0.0
    wide = compute_bytes(plan) if gradients_stay_low_precision(plan) else FP32_BYTES
    shards = [p for stage in rank_shards(job, plan, rank) for p in stage]
    return wide * sum(p.held for p in shards if p.weight.cut is None and not (p.weight.experts and plan.ep > 1))


def _optimizer_flash(job: Job, plan: Plan, rank: int) -> float:
    """Temporary tensors while the largest weight is updated (Optimizer.scratch); fused optimizers need none."""
    coords = coords_of(plan, rank)
    shards = [p.for_optimizer for s in stages_of(plan, coords["pp"]) for p in param_shards(job.model, plan, s, coords)]
    optimizer = OPTIMIZERS[job.optim.name]
    return FP32_BYTES * max((optimizer.of(shard).scratch(shard) for shard in shards), default=0.0)
