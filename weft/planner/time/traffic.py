"""Bytes that a rank passes to collectives in a step, counted exactly for one plan.

`weft dryrun` traces the real engine and finds the same numbers. The bytes of a collective are those of its whole
tensor: what an all-gather returns, what a reduce-scatter takes, what is reduced or sent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from math import prod

from weft.job.compression import parse_compression
from weft.job.optim import OPTIMIZERS, WeightShard
from weft.job.schema import Job, Model
from weft.planner.engine_constants import GRADIENT_ALIGNMENT
from weft.planner.model.parameters import (
    ParamShard,
    coords_of,
    param_shards,
    shard_count,
    stage_range,
    stages_of,
)
from weft.planner.model.weight_table import Weight
from weft.planner.plan import AXES, Plan
from weft.planner.schedules.actions import Schedule
from weft.planner.schedules.known_schedules import make_schedule
from weft.planner.sync import exchange_bytes, one_replica
from weft.planner.time.compression import replica_bytes, shard_bytes
from weft.planner.time.compression_warmup import age, age_ranges
from weft.planner.time.context import attentions, context_bytes
from weft.planner.time.expert_traffic import EXPERT_AXES, expert_bytes, load_bytes

FP32_BYTES = 4
COUNT_BYTES = 8
"""One number in fp64: the count of valid targets, a square of a norm."""

Traffic = dict[str, dict[str, int]]
"""Bytes by axis and by collective."""


def gradients_stay_low_precision(plan: Plan) -> bool:
    """Whether gradients stay in the compute dtype, where the backward pass left them: nothing is summed."""
    return plan.precision != "fp32" and plan.dp == plan.cp == plan.pp == plan.accumulation == 1


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
    shards_of_stages = {stage: param_shards(job.model, plan, stage, coords) for stage in stages}
    for stage, shards in shards_of_stages.items():
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
                trained, place = (
                    [p for p in others if p.weight.trained],
                    coords["dp_replicate"] * plan.cp + coords["cp"],
                )
                out[joint].update(replica_bytes(plan, trained, copies, place, at))
            if plan.dp_replicate * rest > 1:
                out["expert_replicate"]["all_reduce"] += FP32_BYTES * sum(
                    -(-p.whole // GRADIENT_ALIGNMENT) * GRADIENT_ALIGNMENT for p in routed if p.weight.trained
                )
        if plan.tp > 1:
            add = _mlp_tp if job.model.takes_vectors else _transformer_tp
            add(job, plan, stage, out["tp"])
            width = plan.compute_bytes if gradients_stay_low_precision(plan) else FP32_BYTES
            out["tp"]["all_reduce"] += width * sum(
                p.held for p in shards if p.weight.trained and p.weight.cut is None and not _on_ep(p, plan)
            )
        expert_bytes(job, plan, stage, out)
        if schedule is not None:
            _messages(job, plan, schedule, stage, coords["pp"], out["pp"])
    if schedule is not None:
        _tied(job, plan, schedule, coords, out["pp"])
    _optimizer_traffic(job, plan, chain.from_iterable(shards_of_stages.values()), out)
    if plan.cp > 1:
        spans = [stage_range(job.model, plan, stage)[:2] for stage in stages]
        runs = [(first, end, _runs_again(job.model, plan, first, end)) for first, end in spans]
        sequences, group = plan.microbatch * plan.accumulation, coords["cp"] // plan.cp_group
        sent = context_bytes(job.model, plan, sequences, job.data.seq_len, plan.compute_bytes, group, runs, whole=True)
        for kind, amount in sent.items():
            out["cp"][kind] += round(amount)
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
    cut, across = shard_bytes(plan, shards, ways, (gathers, scatters), plan.compute_bytes, at)
    out.update(cut)
    replicas.update(across)


def _transformer_tp(job: Job, plan: Plan, stage: int, tp: Counter[str]) -> None:
    """Two regions of cut matrices in a block, each entered and left; the embedding is only left, the head entered."""
    model, times = job.model, plan.accumulation
    first, end, begins, ends = stage_range(model, plan, stage)
    one = plan.microbatch * job.data.seq_len // plan.cp * (model.dim or 0) * plan.compute_bytes
    enters, leaves, _ = _regions(model, first, end)
    # the source and the target of an encoder and a decoder are embedded
    both = leaves + enters + ends + (0 if model.takes_patches else (1 + model.has_source) * begins)
    some = _runs_again(model, plan, first, end)
    enters_again, leaves_again, dense = _regions(model, first, some)
    projected = attentions(model, first, some)
    if plan.long:  # queries, keys and values once for attention's backward pass, and once for their own
        enters_again, leaves_again, projected = 3 * (end - first), 2 * (end - first), 2 * (end - first)
    elif (
        model.ends_with_product
    ):  # a block that runs again stops at the last matrix, whose input is all that is missing
        leaves_again -= dense
    if plan.sequence:
        tp["all_gather"] += times * one * (both + enters_again)
        tp["reduce_scatter"] += times * one * (both + leaves_again)
    else:
        tp["all_reduce"] += times * one * (both + leaves_again)
    if plan.tp > (model.kv_heads or 0):  # keys and values of which each rank computes a part of a head
        kv = 2 * times * one // (model.dim or 1) * (model.kv_heads or 0) * (model.head_dim or 0)
        tp["all_gather"] += kv * (attentions(model, first, end) + projected)
        tp["reduce_scatter"] += kv * attentions(model, first, end)
    if begins and model.lora is not None:  # what a frozen embedding gives has no gradient
        for kind in ("all_gather", "reduce_scatter") if plan.sequence else ("all_reduce",):
            tp[kind] -= times * one
    if ends:  # for each target: the largest logit, and three sums over the vocabulary
        targets = plan.microbatch * (1 if model.labels_samples else job.data.seq_len // plan.cp)
        tp["all_reduce"] += times * targets * 4 * FP32_BYTES


def _runs_again(model: Model, plan: Plan, first: int, end: int) -> int:
    """The end of those blocks of a stage that are recomputed, which are its first."""
    return first + plan.recomputed(first, end, model.layers or 1)


def _regions(model: Model, first: int, end: int) -> tuple[int, int, int]:
    """How often some blocks enter and leave regions of cut matrices, and how many of them are dense. Cross attention
    enters with both streams."""
    blocks, e = end - first, model.experts
    dense = blocks if e is None else max(0, min(end, e.first_dense) - first)
    unrouted = blocks if e is None or e.shared else dense
    cross = attentions(model, first, end) - blocks
    return blocks + unrouted + 2 * cross, blocks + unrouted + cross, dense


def _mlp_tp(job: Job, plan: Plan, stage: int, tp: Counter[str]) -> None:
    """A pair of layers sums its output forward and the gradient of its input backward, except that of the data."""
    first, end, begins, _ = stage_range(job.model, plan, stage)
    pairs = (job.model.layers or 0) // 2
    rows = sum(1 for i in range(first, end) if i < 2 * pairs and i % 2 == 1)
    columns = sum(1 for i in range(first, end) if i < 2 * pairs and i % 2 == 0 and not (begins and i == 0))
    tp["all_reduce"] += (
        plan.accumulation * (rows + columns) * plan.microbatch * (job.model.dim or 0) * plan.compute_bytes
    )


def _messages(job: Job, plan: Plan, schedule: Schedule, stage: int, here: int, pp: Counter[str]) -> None:
    seq = job.model.sample_positions(job.data.seq_len) // plan.cp // (plan.tp if plan.sequence else 1)
    seq *= 2 if job.model.has_source else 1
    one = plan.accumulation * plan.microbatch * seq * (job.model.dim or 0) * plan.compute_bytes
    for other in (stage - 1, stage + 1):
        if 0 <= other < schedule.stages and schedule.rank_of[other] != here:
            pp["send"] += one
            pp["recv"] += one


def _tied(job: Job, plan: Plan, schedule: Schedule, coords: dict[str, int], pp: Counter[str]) -> None:
    """The first and the last stage swap the gradients of an embedding that is also the head."""
    ends = {0: "embed.weight", schedule.stages - 1: "head.weight"}
    first, last = schedule.rank_of[0], schedule.rank_of[-1]
    if not job.model.tied or job.model.lora is not None or job.model.takes_vectors or first == last:
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


def _optimizer_traffic(job: Job, plan: Plan, shards: Iterable[ParamShard], out: dict[str, Counter[str]]) -> None:
    """What the optimizer sums over the axes that shard a weight, and sends along those that do not."""
    alike: dict[tuple[WeightShard, bool, bool], list[Weight]] = defaultdict(list)  # blocks repeat
    for shard in shards:
        if shard.weight.trained:
            key = shard.for_optimizer, shard.weight.cut is None, bool(shard.weight.experts)
            alike[key].append(shard.weight)
    for (held, _, _), weights in alike.items():
        weight, count = weights[0], len(weights)
        entry = OPTIMIZERS[job.optim.name].of(held)
        copies = replica_axes(plan, weight)
        for axis in copies:
            out[axis]["broadcast"] += count * FP32_BYTES * int(entry.sent(held))
        numbers = entry.traffic(held) / (prod(copies.values()) if entry.takes_turns else 1)
        over_tp = plan.tp > 1 and weight.cut is not None
        for axis, cuts in (("dp_shard", plan.dp_shard > 1), ("tp", over_tp)):
            if cuts and numbers:
                out[axis]["all_reduce"] += count * FP32_BYTES * round(numbers)


def communication_bytes(job: Job, plan: Plan, last: bool = False) -> dict[str, float]:
    """Bytes that a rank in the middle of the pipeline passes to collectives in a step, by axis, without receives: on
    average over the run, or in its last step."""
    inner = one_replica(plan)
    if last:
        ranges = [(1.0, age(job.train.steps - 1, plan.compression_warmup))]
    else:
        wanted = parse_compression(plan.compression)
        ranges = age_ranges(wanted, job.train.steps, plan.compression_warmup, plan.dp_replicate * max(1, plan.cp_cut))
    rank = inner.world // inner.pp * (inner.pp // 2)
    out: dict[str, float] = defaultdict(float)
    for share, at in ranges:
        for axis, kinds in traffic_of(job, inner, rank, at).items():
            out[axis] += share * sum(amount for kind, amount in kinds.items() if kind != "recv")
    return dict(out) | exchange_bytes(job, plan)


AXIS_OF = {
    "dp_shard_cp": "dp_shard", "dp_replicate_cp": "dp_replicate", "ep_near": "ep", "ep_far": "ep",
    "ep_shard": "dp_shard", "expert_replicate": "dp_replicate", "server": "dp_replicate",
}  # fmt: skip
"""Axes under which the traffic of other groups of ranks is reported."""


def axis_bytes(job: Job, plan: Plan) -> dict[str, float]:
    """The sums of `communication_bytes` by axis of the layout, and `everyone` for all ranks."""
    out = dict.fromkeys((*reversed(AXES[1:]), "ep", "pp"), 0.0)
    for group, bytes_ in communication_bytes(job, plan).items():
        axis = AXIS_OF.get(group, group)
        out[axis] = out.get(axis, 0.0) + bytes_
    return out
