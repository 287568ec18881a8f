"""Time to sum gradients and gather weights over data-parallel ranks, and to update the weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.planner.calibration import Calibration
from weft.planner.memory.framework_memory import weights
from weft.planner.model.cluster_facts import ClusterFacts
from weft.planner.model.model_facts import ModelFacts, Size
from weft.planner.search.candidates import OFFLOADS, PRECISIONS, Layouts
from weft.planner.time import collectives as links
from weft.planner.time.allreduce_messages import by_messages
from weft.planner.time.compression import encoding_bytes, gradient_bytes, weight_bytes
from weft.planner.time.compute import MEMORY_SHARE
from weft.planner.time.pipeline import stage_layers

HOST_UPDATE_BYTES_S = 50e9 / 30
"""Weights a second that an optimizer on the host updates: 30 bytes each at 50 GB/s."""


@dataclass(frozen=True)
class WeightExchange:
    """Seconds of communication before any of it is hidden."""

    once: Size
    """Gradients and weights of a step where each is sent once: plain replicas and ZeRO 1."""
    gathers: Size
    """All weights gathered once."""
    scatter: Size
    """All gradients summed and sharded once."""
    between: Size
    """Shards of gradients summed over replicas."""
    encoding: Size
    """Compressing the gradients once."""
    optimizer: Size
    sums: Size
    """Adding a microbatch's gradients to those before, or copying them into the buffers of their sums."""
    message: Size
    """Latency of a message between stages."""
    stage_gb_s: Size
    """Bandwidth between two stages."""
    largest: Size
    """Blocks of the largest stage."""
    last: Size
    """Blocks of the last stage."""

    @classmethod
    def columns(cls, layouts: Layouts) -> tuple[Size, ...]:
        """The settings that these times depend on."""
        return (
            layouts.tp, layouts.pp, layouts.virtual_stages, layouts.back_and_forth, layouts.ep,
            layouts.cp, layouts.dp_shard, layouts.dp_replicate, layouts.zero, layouts.compression,
            layouts.precision, layouts.offload,
        )  # fmt: skip


def weight_exchange(model: ModelFacts, cluster: ClusterFacts, layouts: Layouts, cal: Calibration) -> WeightExchange:
    ends = (weights(model, layouts, index) for index in (0, layouts.pp - 1))
    shared, experts = (np.maximum(first, last) for first, last in zip(*ends, strict=True))
    size = layouts.element_bytes
    trained = np.where(np.asarray(model.frozen) > 0, 0.01, 1.0)
    over_all = np.maximum(layouts.dp * layouts.cp * layouts.tp / layouts.ep, 1)
    expert_ranks = links.rank_group(cluster, over_all, layouts.ep, cal)
    grad, weight = gradient_bytes(layouts, model, cal), weight_bytes(layouts, size)
    z = layouts.zero

    def sent(ranks: links.Group, bytes_each: Size) -> Size:
        own = links.all_gather_time(ranks, shared * bytes_each)
        return own + links.all_gather_time(expert_ranks, experts * bytes_each)

    all_ranks = links.rank_group(cluster, layouts.dp * layouts.cp, layouts.tp, cal)
    shards = links.rank_group(cluster, layouts.dp_shard * layouts.cp, layouts.tp, cal)
    replicas = links.axis_group(cluster, layouts, "dp_replicate", cal)
    between = links.all_reduce_time(replicas, (shared + experts) / layouts.dp_shard * grad * trained)
    memory = cluster.memory_gb_s * 1e9 * MEMORY_SHARE
    # the optimizer reads gradients and moves its state once
    cut = np.where(z > 0, layouts.dp_shard * layouts.cp, 1)
    owned = (shared / cut + experts / np.where(z > 0, np.maximum(cut * layouts.tp / layouts.ep, 1), 1)) * trained
    state = owned * (2 * cal.moment_bytes + 2 * cal.master_bytes + cal.gradient_bytes + size)
    products = model.update_flops / layouts.pp / layouts.dp_replicate  # ranks with the same shard take turns
    peaks = {name: cluster.peak_tflops[name] for name in ("fp32", "bf16")}
    fast = np.where(layouts.precision == PRECISIONS.index("fp32"), peaks["fp32"], np.maximum(*peaks.values()))
    rate = fast * 1e12 * cluster.reach * cal.matmul
    on_host = owned * (4 + size) / (cluster.host_gb_s * 1e9) + owned / HOST_UPDATE_BYTES_S
    offloaded = layouts.offload == OFFLOADS.index("optimizer")
    stages = links.axis_group(cluster, layouts, "pp", cal)
    largest, last = stage_layers(model.layers, layouts.pp * layouts.virtual_stages)
    once = sent(all_ranks, grad * trained) + sent(all_ranks, np.where(z >= 1, weight, grad) * trained)
    if by_messages(cluster.allreduce):
        by = links.REPLICA_SUMS[cluster.allreduce]
        summed = by(all_ranks, shared * grad * trained) + links.all_reduce_time(expert_ranks, experts * grad * trained)
        once = np.where(z >= 1, once, summed)
    return WeightExchange(
        once=once,
        gathers=sent(shards, weight), scatter=sent(shards, grad * trained),
        between=np.where(layouts.dp_replicate > 1, between, 0.0),
        encoding=(shared + experts) * trained * encoding_bytes(layouts) / memory,
        optimizer=np.where(offloaded, on_host, cal.optimizer * model.update_time * state / memory) + products / rate,
        sums=(shared + experts) * trained * cal.sum_bytes / memory,
        message=links.send_time(stages, 0.0), stage_gb_s=stages.one_gb_s, largest=largest, last=last,
    )  # fmt: skip
