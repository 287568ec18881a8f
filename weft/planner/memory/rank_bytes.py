"""The exact bytes of one rank: its weights, gradients and optimizer state, and what it hands to collectives in a step.

Nothing here is estimated: `weft dryrun` traces the real engine and finds the same numbers. A collective's bytes are
those of its whole tensor: what an all-gather gives, what a reduce-scatter takes, what is reduced or sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from math import prod

from weft.job.optim import OPTIMIZERS
from weft.job.schema import Job
from weft.planner.engine_constants import GRADIENT_ALIGNMENT
from weft.planner.memory.expert_bytes import EXPERT_AXES, expert_bytes, load_bytes
from weft.planner.model.parameters import (
    ParamShard,
    coords_of,
    param_shards,
    shard_count,
    stage_range,
    stages_of,
)
from weft.planner.model.weight_table import Weight
from weft.planner.plan import Plan
from weft.planner.schedules.actions import Schedule
from weft.planner.schedules.registry import make_schedule
from weft.planner.time.compression import replica_bytes, shard_bytes
from weft.planner.time.compression_warmup import age
from weft.planner.time.context import context_bytes

FP32_BYTES = 4
COUNT_BYTES = 8
"""One number in fp64: the count of valid targets, a square of a norm."""

Traffic = dict[str, dict[str, int]]
"""Bytes by axis and by collective."""


@dataclass(frozen=True)
class States:
    """Bytes of what a rank keeps between steps."""

    parameters: int
    """fp32 master weights, with the padding of shards."""
    copies: int
    """Weights in the compute dtype that stay beside the master weights; shards gather theirs when they need them."""
    gradients: int
    """fp32, after the backward pass."""
    optimizer: int
    average: int
    """The moving average of the weights, where train.ema asks for one."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def compute_bytes(plan: Plan) -> int:
    """Bytes of an element of weights and activations while they compute."""
    return FP32_BYTES if plan.precision == "fp32" else 2


def gradients_stay_low_precision(plan: Plan) -> bool:
    """Whether gradients stay in the compute dtype, where the backward pass left them: nothing is summed."""
    return plan.precision != "fp32" and plan.dp == plan.cp == plan.pp == plan.accumulation == 1


def rank_shards(job: Job, plan: Plan, rank: int) -> list[list[ParamShard]]:
    """What a rank holds of every weight, stage by stage."""
    coords = coords_of(plan, rank)
    return [param_shards(job.model, plan, s, coords) for s in stages_of(plan, coords["pp"])]


def states_of(job: Job, plan: Plan, rank: int = 0) -> States | None:
    """What a rank keeps; None for a module of a person's own, which is not described here."""
    if job.model.module:
        return None
    shards = [p for stage in rank_shards(job, plan, rank) for p in stage]
    held = sum(p.held for p in shards)
    if plan.dp_shard > 1:
        padded = sum(p.padded for p in shards)
        parameters = gradients = FP32_BYTES * padded
        copies = 0
    else:
        whole = sum(p.whole for p in shards)
        buckets = plan.dp_replicate > 1 or plan.precision != "fp32"
        parameters = FP32_BYTES * whole
        gradients = FP32_BYTES * (
            sum(-(-p.whole // GRADIENT_ALIGNMENT) * GRADIENT_ALIGNMENT for p in shards) if buckets else whole
        )
        if gradients_stay_low_precision(plan):
            gradients = 2 * whole
        copies = 0 if plan.precision == "fp32" else 2 * whole
    optimizer = sum(_optimizer_bytes(job, p) for p in shards)
    return States(parameters, copies, gradients, optimizer, FP32_BYTES * held if job.train.ema else 0)


def _optimizer_bytes(job: Job, shard: ParamShard) -> int:
    entry = OPTIMIZERS[job.optim.name].of(shard.for_optimizer)
    return int(FP32_BYTES * entry.state(job.optim, shard.for_optimizer))


def traffic_of(job: Job, plan: Plan, rank: int = 0, at: float | None = None) -> Traffic:
    """Bytes by axis and collective of one step on one rank; empty for a module of a person's own. `at` is the run's age
    where gradients are compressed (planner/time/compression_warmup.py); left out, that of the first step."""
    at = age(0, plan.compression_warmup) if at is None else at
    if job.model.module:
        return {}
    coords = coords_of(plan, rank)
    stages = stages_of(plan, coords["pp"])
    schedule = make_schedule(plan.schedule, plan.pp, plan.accumulation, plan.virtual_stages) if plan.pp > 1 else None
    held = schedule is not None and any(a.kind in "IW" for a in schedule.actions[coords["pp"]])
    joint = plan.joint_axis or "dp_replicate"
    axes = (*plan.axes, joint, *EXPERT_AXES, "everyone")
    out: dict[str, Counter[str]] = {axis: Counter() for axis in axes}
    for stage in stages:
        shards = param_shards(job.model, plan, stage, coords)
        routed = [p for p in shards if _on_ep(p, plan)]
        others = [p for p in shards if not _on_ep(p, plan)]
        rest = plan.dp_shard * plan.cp * plan.tp // plan.ep
        if plan.dp_shard > 1:
            _shards(plan, others, held, out[joint], shard_count(plan), out["dp_replicate"], at)
            if plan.ep > 1 and rest * plan.dp_replicate > 1:
                plain = replace(plan, compression="none")
                _shards(plain, routed, held, out["ep_shard"], rest, out["dp_replicate"], at)
        else:
            if (copies := plan.dp_replicate * plan.cp) > 1:
                out[joint].update(replica_bytes(plan, others, copies, at))
            if plan.dp_replicate * rest > 1:
                out["expert_replicate"]["all_reduce"] += FP32_BYTES * sum(
                    -(-p.whole // GRADIENT_ALIGNMENT) * GRADIENT_ALIGNMENT for p in routed
                )
        if plan.tp > 1:
            add = _mlp_tp if job.model.is_stack else _transformer_tp
            add(job, plan, stage, out["tp"])
            out["tp"]["all_reduce"] += FP32_BYTES * sum(
                p.held for p in shards if p.weight.cut is None and not _on_ep(p, plan)
            )
        expert_bytes(job, plan, stage, out)
        if schedule is not None:
            _messages(job, plan, schedule, stage, coords["pp"], out["pp"])
    if schedule is not None:
        _tied(job, plan, schedule, coords, out["pp"])
    _optimizer_traffic(job, plan, coords, out)
    if plan.cp > 1:
        seen = plan.microbatch * plan.accumulation * job.data.seq_len
        sent = context_bytes(job.model, plan, seen, compute_bytes(plan), coords["cp"] // plan.cp_group)
        whole = {"all_to_all": plan.cp_group / max(1, plan.cp_group - 1)}  # with what a rank keeps of its own
        for kind, amount in sent.items():
            out["cp"][kind] += round(amount * whole.get(kind, 1))
    if plan.world > 1:  # where one axis is all there is, it is everyone
        degrees = {**plan.axes, joint: (plan.dp_shard if plan.dp_shard > 1 else plan.dp_replicate) * plan.cp}
        everyone = next((axis for axis, degree in degrees.items() if degree == plan.world), "everyone")
        out[everyone]["all_reduce"] += COUNT_BYTES + load_bytes(job)
        for axis in [a for a in ("dp_shard", "cp", "tp", "pp") if plan.axes[a] > 1] if plan.alone else [everyone]:
            out[axis]["all_reduce"] += COUNT_BYTES  # the norm of all gradients
    return {axis: dict(kinds) for axis, kinds in out.items() if kinds.total()}


def _on_ep(shard: ParamShard, plan: Plan) -> bool:
    return shard.weight.experts and plan.ep > 1


def _shards(
    plan: Plan, shards: list[ParamShard], held: bool, out: Counter[str], ways: int, replicas: Counter[str], at: float
) -> None:  # fmt: skip
    """FSDP2's: weights are gathered in the compute dtype, gradients summed and cut in fp32, copies' once a step."""
    gathers = 2 * plan.accumulation if plan.zero == 3 and not held else 1
    scatters = 1 if plan.zero == 1 or held else plan.accumulation
    cut, across = shard_bytes(plan, shards, ways, (gathers, scatters), compute_bytes(plan), at)
    out.update(cut)
    replicas.update(across)


def _transformer_tp(job: Job, plan: Plan, stage: int, tp: Counter[str]) -> None:
    """Two regions of cut matrices a block, each entered and left; the embedding is left, the head entered."""
    model, times = job.model, plan.accumulation
    first, end, begins, ends = stage_range(model, plan, stage)
    blocks = end - first
    one = plan.microbatch * job.data.seq_len // plan.cp * (model.dim or 0) * compute_bytes(plan)
    e = model.experts
    dense = blocks if e is None else max(0, min(end, e.first_dense) - first)
    unrouted = blocks if e is None or e.shared else dense
    enters = blocks + unrouted + (1 if ends else 0)
    leaves = blocks + unrouted + (1 if begins and not model.is_classifier else 0)
    # a block that runs again stops at the last matrix, whose input is all that is missing (unless dropout follows)
    once_more = (blocks + unrouted, blocks + unrouted - (0 if model.dropout else dense))
    again = once_more if plan.recompute == "full" else (0, 0)
    if plan.sequence:
        tp["all_gather"] += times * one * (enters + leaves + again[0])
        tp["reduce_scatter"] += times * one * (enters + leaves + again[1])
    else:
        tp["all_reduce"] += times * one * (enters + leaves + again[1])
    if ends:  # for each target: the largest logit, and three sums over the vocabulary
        targets = plan.microbatch * (1 if model.is_classifier else job.data.seq_len // plan.cp)
        tp["all_reduce"] += times * targets * 4 * FP32_BYTES


def _mlp_tp(job: Job, plan: Plan, stage: int, tp: Counter[str]) -> None:
    """A pair of layers sums its output forward and the gradient of its input back; nobody wants that of the data."""
    first, end, begins, _ = stage_range(job.model, plan, stage)
    pairs = (job.model.layers or 0) // 2
    rows = sum(1 for i in range(first, end) if i < 2 * pairs and i % 2 == 1)
    columns = sum(1 for i in range(first, end) if i < 2 * pairs and i % 2 == 0 and not (begins and i == 0))
    tp["all_reduce"] += (
        plan.accumulation * (rows + columns) * plan.microbatch * (job.model.dim or 0) * compute_bytes(plan)
    )


def _messages(job: Job, plan: Plan, schedule: Schedule, stage: int, here: int, pp: Counter[str]) -> None:
    seq = 1 if job.model.is_stack else job.data.seq_len // plan.cp // (plan.tp if plan.sequence else 1)
    one = plan.accumulation * plan.microbatch * seq * (job.model.dim or 0) * compute_bytes(plan)
    for other in (stage - 1, stage + 1):
        if 0 <= other < schedule.stages and schedule.rank_of[other] != here:
            pp["send"] += one
            pp["recv"] += one


def _tied(job: Job, plan: Plan, schedule: Schedule, coords: dict[str, int], pp: Counter[str]) -> None:
    """The first and the last stage swap the gradients of an embedding that is also the head."""
    ends = {0: "embed.weight", schedule.stages - 1: "head.weight"}
    first, last = schedule.rank_of[0], schedule.rank_of[-1]
    if not job.model.tied or job.model.is_stack or first == last:
        return
    for stage, name in ends.items():
        if schedule.rank_of[stage] == coords["pp"]:
            held = next(p.held for p in param_shards(job.model, plan, stage, coords) if p.weight.name == name)
            pp["send"] += FP32_BYTES * held
            pp["recv"] += FP32_BYTES * held


def replica_axes(plan: Plan, weight: Weight) -> dict[str, int]:
    """The axes along which other ranks hold the same shard of a weight, and their sizes."""
    if weight.experts and plan.ep > 1:
        rest = plan.dp_shard * plan.cp * plan.tp // plan.ep
        sizes = {"dp_replicate": plan.dp_replicate, "ep_shard": rest if plan.dp_shard == 1 else 1}
    else:
        sizes = {
            "dp_replicate": plan.dp_replicate,
            "cp": plan.cp if plan.dp_shard == 1 else 1,
            "tp": plan.tp if weight.cut is None else 1,
        }
    return {axis: size for axis, size in sizes.items() if size > 1 and not (plan.alone and axis == "dp_replicate")}


def _optimizer_traffic(job: Job, plan: Plan, coords: dict[str, int], out: dict[str, Counter[str]]) -> None:
    """What the optimizer sums over the axes that shard a weight, and sends along those that do not."""
    for stage in stages_of(plan, coords["pp"]):
        for shard in param_shards(job.model, plan, stage, coords):
            entry = OPTIMIZERS[job.optim.name].of(shard.for_optimizer)
            copies = replica_axes(plan, shard.weight)
            for axis in copies:
                out[axis]["broadcast"] += FP32_BYTES * int(entry.sent(shard.for_optimizer))
            numbers = entry.traffic(shard.for_optimizer) / (prod(copies.values()) if entry.takes_turns else 1)
            over_tp = plan.tp > 1 and shard.weight.cut is not None
            for axis, cuts in (("dp_shard", plan.dp_shard > 1), ("tp", over_tp)):
                if cuts and numbers:
                    out[axis]["all_reduce"] += FP32_BYTES * round(numbers)


def flops_of(job: Job, plan: Plan, rank: int = 0) -> float:
    """Products of one rank in a step, a multiplication and an addition each 2 by the usual count; causal attention
    counts the half that is needed, and what recompute does again is counted again."""
    model, coords = job.model, coords_of(plan, rank)
    samples = plan.microbatch * plan.accumulation
    seq = 1 if model.is_stack else job.data.seq_len
    total = 0.0
    for stage in stages_of(plan, coords["pp"]):
        first, end, begins, ends = stage_range(model, plan, stage)
        for shard in param_shards(model, plan, stage, coords):
            name, size = shard.weight.name, prod(shard.weight.on_tp(plan.tp, coords["tp"]))
            if shard.weight.experts and model.experts is not None:  # each token meets a few; load is taken as even
                each = prod(shard.weight.shape[1:]) * model.experts.top_k
                total += (8.0 if plan.recompute == "full" else 6.0) * samples * seq * each / plan.cp / plan.tp
                continue
            if len(shard.weight.shape) != 2 or name == "positions.weight":
                continue
            if name == "embed.weight" and not model.is_classifier:
                if model.tied and ends:
                    total += 6.0 * samples * seq * size
                continue
            passes = 3.0
            if not shard.weight.unit:
                tokens = samples * (1 if name == "head.weight" and model.is_classifier else seq)
                passes = 2.0 if name == "embed.weight" else 3.0  # nobody wants the gradient of patches
            else:
                tokens = samples * seq
                passes += 1.0 if plan.recompute == "full" and not name.endswith("mlp.down.weight") else 0.0
                if name.endswith("router.weight"):  # each rank routes its own tokens
                    tokens //= plan.tp
                if model.is_stack:
                    passes = 2.0 if begins and shard.weight.unit == "layers.0" else 3.0
            total += 2.0 * passes * tokens * size / plan.cp
        if not model.is_stack:
            scores = 4.0 * samples * seq * seq * (model.heads or 0) * (model.head_dim or 0) / plan.tp / plan.cp
            passes = 4.0 if plan.recompute == "full" else 3.0
            total += passes * (end - first) * scores / (2.0 if model.causal else 1.0)
        for shard in param_shards(model, plan, stage, coords):
            entry = OPTIMIZERS[job.optim.name].of(shard.for_optimizer)
            turns = prod(replica_axes(plan, shard.weight).values()) if entry.takes_turns else 1
            total += entry.flops(shard.for_optimizer) / turns
    return total
