"""Predicted memory, traffic and time of a module of a person's own, from facts that a trace of it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from weft.hardware.catalog import find_device, find_network
from weft.hardware.probe import GIB
from weft.job.errors import JobError
from weft.job.optim import OPTIMIZERS, WeightShard
from weft.job.schema import Job
from weft.planner.memory.layout_group import RUNTIME_BYTES
from weft.planner.memory.live_bytes import FP32_BYTES
from weft.planner.model.reference_rate import peak_flops
from weft.planner.own_calibration import own_calibration
from weft.planner.plan import Plan
from weft.planner.time.compute import MEMORY_SHARE

LAUNCH_US = 12.0
"""Time of the host for one operator in the forward or backward pass."""
PASSES = 3.0
"""How often a tensor is written or read: once written, about twice read."""


@dataclass(frozen=True)
class ModuleFacts:
    """What a trace of one microbatch found."""

    trained: Sequence[tuple[int, ...]]
    """Shapes of the weights that are trained."""
    frozen: int
    """Elements of other weights."""
    units: int
    """Parts that sharding gathers one by one."""
    activations: float
    """Peak bytes beside weights and their gradients."""
    flops: float
    """Of matrix products and convolutions, forward and backward."""
    written: float
    """Bytes of all tensors that were made."""
    operators: int
    tp_reduced: float = 0.0
    """Elements of activations and their gradients that a microbatch sums over tp."""
    tp_gathered: float = 0.0
    """Elements of weights that a microbatch gathers over tp."""
    pp_sent: float = 0.0
    """Elements that the first stage sends for a microbatch."""


def predict_module(job: Job, plan: Plan, facts: ModuleFacts) -> dict[str, float]:
    """Memory, traffic and time of a rank, under the names that every run prints."""
    kept = module_states(job, plan, facts)
    gathered = kept.pop("copies")
    states = sum(kept.values())
    if _shards(plan) > 1:
        whole = plan.compute_bytes * _elements(plan, facts)[1]
        gathered = whole * (1.0 if plan.zero < 3 else min(1.0, 2 / max(1, facts.units)))
    activations = facts.activations / (plan.tp * plan.pp)
    runtime = RUNTIME_BYTES[plan.device]
    moved = sum(module_traffic(plan, facts).values())
    memory = {
        "memory_gib": (states + gathered + activations + runtime) / GIB, "states_gib": states / GIB,
        "gathered_gib": gathered / GIB, "activations_gib": activations / GIB, "runtime_gib": runtime / GIB,
        "communication_mib": moved / 2**20,
    }  # fmt: skip
    return memory | _time(job, plan, facts, states, moved)


def _shards(plan: Plan) -> int:
    return plan.dp_shard * plan.cp if plan.dp_shard > 1 else 1


def _elements(plan: Plan, facts: ModuleFacts) -> tuple[float, float]:
    """Elements of trained and of all weights of a rank before they are sharded. Where tp or pp cut the module, every
    rank is taken to have an equal part of it."""
    trained = sum(prod(shape) for shape in facts.trained)
    return trained / (plan.tp * plan.pp), (trained + facts.frozen) / (plan.tp * plan.pp)


def module_states(job: Job, plan: Plan, facts: ModuleFacts) -> dict[str, float]:
    """Bytes of each kind of state that a rank keeps; copies are the weights in a lower precision."""
    (trained, weights), shards, low = _elements(plan, facts), _shards(plan), plan.compute_bytes
    return {
        "parameters": FP32_BYTES * weights / shards,
        "copies": low * weights if low != FP32_BYTES and shards == 1 else 0.0,
        "gradients": FP32_BYTES * trained / shards,
        "optimizer": sum(_state_bytes(job, shape, plan.tp * plan.pp * shards) for shape in facts.trained),
        "average": FP32_BYTES * trained / shards if job.train.ema else 0.0,
    }


def _state_bytes(job: Job, shape: tuple[int, ...], ways: int) -> float:
    shard = WeightShard(shape, -(-prod(shape) // ways), False)
    return FP32_BYTES * float(OPTIMIZERS[job.optim.name].of(shard).state(job.optim, shard))


def module_traffic(plan: Plan, facts: ModuleFacts) -> dict[tuple[str, str], float]:
    """Bytes that a rank passes to collectives in a step, and sends to the next stage, by axis and kind."""
    (trained, weights), shards = _elements(plan, facts), _shards(plan)
    summed = FP32_BYTES * trained / shards if plan.dp_replicate > 1 else 0.0
    low = plan.compute_bytes * plan.accumulation
    inside = {
        ("tp", "all_reduce"): low * facts.tp_reduced / plan.pp, ("tp", "all_gather"): low * facts.tp_gathered / plan.pp,
        ("tp", "reduce_scatter"): low * facts.tp_gathered / plan.pp, ("pp", "send"): low * facts.pp_sent,
    }  # fmt: skip
    inside = {key: moved for key, moved in inside.items() if moved}
    if shards == 1:
        return {("dp_replicate", "all_reduce"): summed, **inside}
    gathers = 2 * plan.accumulation if plan.zero == 3 else 1
    scatters = 1 if plan.zero == 1 else plan.accumulation
    return {
        ("dp_shard", "all_gather"): gathers * plan.compute_bytes * weights,
        ("dp_shard", "reduce_scatter"): scatters * FP32_BYTES * trained,
        ("dp_replicate", "all_reduce"): summed,
        **inside,
    }


def _time(job: Job, plan: Plan, facts: ModuleFacts, states: float, moved: float) -> dict[str, float]:
    """Seconds of a step and MFU where the device's peak is known."""
    peak = peak_flops(plan, job)
    if not peak:
        return {}
    try:
        device = find_device(plan.device_name, job.cluster.catalog)
        network = job.cluster.network if job.cluster.network != "auto" else device.network
        link = find_network(network, job.cluster.catalog).gb_s if plan.nodes > 1 else device.link_gb_s
    except JobError:
        return {}
    cal = own_calibration(job, device)
    bandwidth = device.memory_tb_s * 1e12 * MEMORY_SHARE
    parts = plan.tp * plan.pp
    products = facts.flops / (peak * device.matmul_share * cal.matmul)
    rest = PASSES * facts.written / bandwidth
    passes = plan.accumulation * max((products + rest) / parts, facts.operators * LAUNCH_US * 1e-6 / plan.pp)
    bubble = 1 + (plan.pp - 1) / (plan.accumulation * plan.virtual_stages)
    share = cal.network if plan.nodes > 1 else cal.link
    sent = moved * (2 if plan.dp_shard == 1 else 1) / (link * 1e9 * share) if plan.world > 1 and link else 0.0
    exposed = sent - cal.overlap_dp * min(sent, passes * 2 / 3)
    seconds = passes * bubble + exposed + cal.optimizer * states / bandwidth + cal.step_ms * 1e-3
    return {"step_time_s": seconds, "mfu": min(1.0, plan.accumulation * facts.flops / parts / (seconds * peak))}
