"""Bytes that experts pass to collectives in a step, for an even load: tokens, counts and balancing losses."""

from __future__ import annotations

from collections import Counter

from weft.job.schema import Job
from weft.planner.model.parameters import stage_range
from weft.planner.plan import Plan

EXPERT_AXES = ("ep", "ep_near", "ep_far", "ep_shard", "expert_replicate")
"""Axes of the experts' mesh (mesh.py); an axis with the same ranks as another one has the other's name."""
INDEX_BYTES = 8
"""Bytes of a count or a place."""


def expert_bytes(job: Job, plan: Plan, stage: int, out: dict[str, Counter[str]]) -> None:
    """Bytes of one stage's mixtures, by axis and collective, added to `out`."""
    e = job.model.experts
    if e is None:
        return
    first, end, _, _ = stage_range(job.model, plan, stage)
    blocks = max(0, end - max(first, e.first_dense))
    again = max(0, first + plan.recomputed(first, end, job.model.layers or 1) - max(first, e.first_dense))
    passes = plan.accumulation * (blocks + again)  # forward
    size = plan.compute_bytes * (job.model.dim or 0)
    seq = -(-job.data.seq_len // (plan.cp * plan.tp))
    tokens = plan.microbatch * seq
    if plan.ep > 1:
        trips = plan.accumulation * (4 * blocks + 2 * again)  # there and back, in each pass
        for axis in ("ep",) if plan.ep_hop == 1 else ("ep_near", "ep_far"):
            out[axis]["all_to_all"] += trips * tokens * e.top_k * size + passes * e.count * INDEX_BYTES
    if plan.tp > 1 and not plan.sequence:  # parts of the tokens are joined going out, and their gradients going back
        joined = 2 * blocks + (0 if job.model.ends_with_product else again)
        out["tp"]["all_gather"] += plan.accumulation * joined * tokens * plan.tp * size
    parts = [(axis, degree) for axis, degree in (("tp", plan.tp), ("cp", plan.cp)) if degree > 1]
    if e.aux_scope == "sequence" and (e.balance == "aux" if e.aux_weight is None else e.aux_weight > 0):
        for axis, _ in parts:
            out[axis]["all_reduce"] += passes * plan.microbatch * e.count * INDEX_BYTES
    if e.capacity is not None:
        for axis, degree in parts:
            seq *= degree
            out[axis]["all_gather"] += passes * seq * (plan.microbatch * e.top_k + 1) * INDEX_BYTES


def load_bytes(job: Job) -> int:
    """Of every step: tokens by block and expert, those dropped, and two losses, summed over all ranks."""
    e = job.model.experts
    return 0 if e is None else INDEX_BYTES * max(0, (job.model.layers or 0) - e.first_dense) * (e.count + 3)
