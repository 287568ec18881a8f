"""The estimate of many layouts at once: step time with its parts, memory with its parts, and whether they fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.planner.calibration import Calibration
from weft.planner.memory.framework_memory import GIB, framework_memory, weights
from weft.planner.model.facts import ClusterFacts, ModelFacts, Size
from weft.planner.search.candidates import CP_STYLES, OFFLOADS, RECOMPUTES, Layouts
from weft.planner.time import collectives as links
from weft.planner.time.compression import encoding_bytes, gradient_bytes, weight_bytes
from weft.planner.time.compute import MEMORY_SHARE, compute_time, peak_flops_by_precision
from weft.planner.time.pipeline import stage_layers, step_time

PROFILE_WIDTH = 0.25
"""Width, in doublings of a shape's sides, of the kernel that interpolates measured blocks."""
SLOW_KERNEL_LAUNCHES = 1.3
"""Host time of a block whose attention scores use the slower kernels, over one with fast kernels."""


@dataclass(frozen=True)
class Estimates:
    """One entry a layout in every array."""

    step_time_s: Size
    low_s: Size
    high_s: Size
    memory: dict[str, Size]
    """GiB by component of the fullest rank, or their total."""
    peak_gib: Size
    fits: Size
    time: dict[str, Size]
    """Exposed seconds of a step by part; they add up to step_time_s."""
    bytes: dict[str, Size]
    """Bytes one rank passes to collectives in a step, by axis."""
    level_bytes: dict[str, Size]
    """Bytes one rank sends over each level of the topology in a step."""
    tflops: Size
    mfu: Size
    hfu: Size

    def scaled(self, factor: Size) -> Estimates:
        """The same with step times multiplied by a factor."""
        return replace(
            self, step_time_s=self.step_time_s * factor, low_s=self.low_s * factor, high_s=self.high_s * factor,
            time={part: seconds * factor for part, seconds in self.time.items()}, tflops=self.tflops / factor,
            mfu=self.mfu / factor, hfu=self.hfu / factor,
        )  # fmt: skip


def _smooth_max(a: Size, b: Size, power: float) -> Size:
    """A smooth maximum."""
    top = np.maximum(np.maximum(a, b), 1e-30)
    return top * ((a / top) ** power + (b / top) ** power) ** (1 / power)


def _profiled(cal: Calibration, tokens: Size, dim: Size, tp: Size) -> Size:
    """Ratio of measured to computed time for similar measured shapes; 1 where there are none."""
    points = np.log2(np.array(cal.profile))
    here = np.stack(np.broadcast_arrays(np.log2(tokens), np.log2(dim), np.log2(tp)), axis=-1)
    near = np.exp(-(((here[:, None, :] - points[None, :, :3]) / PROFILE_WIDTH) ** 2).sum(-1) / 2)
    return np.exp2(near @ points[:, 3] / (near.sum(-1) + 0.02))


def _exposed(comm: Size, window: Size, overlap: float) -> Size:
    return comm - overlap * np.minimum(comm, window)


def estimate(
    model: ModelFacts, cluster: ClusterFacts, layouts: Layouts, cal: Calibration, global_batch: Size,
    memory: dict[str, Size] | None = None,
) -> Estimates:  # fmt: skip
    """Time, memory and traffic of every layout. `memory` is bytes by part; by default the calibrated framework's."""
    w = compute_time(model, cluster, layouts, cal)
    g = links.axis_groups(cluster, layouts, cal)
    tokens = layouts.microbatch * model.seq_len / layouts.cp
    size = np.where(layouts.precision == 0, 4.0, 2.0)
    row = tokens * model.dim * size
    count = layouts.accumulation
    stages = layouts.pp * layouts.virtual_stages
    most, _ = stage_layers(model.layers, stages)
    here = np.where(layouts.pp > 1, most * layouts.virtual_stages, model.layers)
    full = layouts.recompute == RECOMPUTES.index("full")
    again_share = np.where(
        layouts.recompute_blocks >= 0, np.minimum(layouts.recompute_blocks / np.maximum(here, 1), 1), 1.0
    )

    # tensor parallel: two sums forward and two backward a block, as large as the residual stream
    tp_one = 2 * links.all_reduce_time(g["tp"], row) * (1 - cal.overlap_tp)
    # context parallel: keys and values go round, or heads are exchanged
    kv_bytes = 2 * tokens * model.kv_width / layouts.tp * size
    ring = (layouts.cp - 1) * links.send_time(g["cp"], kv_bytes)
    swap = links.all_to_all_time(g["cp"], tokens * (2 * model.q_width + 2 * model.kv_width) / layouts.tp * size)
    cp_comm = np.where(layouts.cp > 1, np.where(layouts.cp_style == CP_STYLES.index("ring"), ring, swap), 0.0)
    cp_f, cp_b = (
        _exposed(cp_comm, w.attention, cal.overlap_cp),
        _exposed(2 * cp_comm, 2.5 * w.attention, cal.overlap_cp),
    )
    # expert parallel: tokens go to their experts and back
    share = model.moe_layers / model.layers
    routed = tokens / layouts.tp * model.top_k * model.dim * size
    ep_one = share * 2 * links.all_to_all_time(g["ep"], routed, model.top_k) * (1 - cal.overlap_ep)

    host = (
        np.full(len(layouts), cal.host_us * 1e-6)
        + share * cal.host_moe_us * 1e-6 * np.maximum(model.experts, 1) / layouts.ep
    )
    if cal.score_batch:
        odd = np.mod(layouts.microbatch * model.heads / layouts.tp, cal.score_batch) != 0
        host = host * np.where(odd, SLOW_KERNEL_LAUNCHES, 1.0)
    gpu_f, gpu_b = w.forward + tp_one + cp_f + ep_one, w.backward + tp_one + cp_b + ep_one
    again_gpu = (
        np.where(full, gpu_f, np.where(layouts.recompute == RECOMPUTES.index("selective"), w.inner, 0)) * again_share
    )
    again_host = np.where(full, host, 0.0) * again_share
    forward = _smooth_max(gpu_f, host, cal.host_blend)
    again = _smooth_max(again_gpu, again_host, cal.host_blend)
    backward = _smooth_max(gpu_b, host * cal.host_backward, cal.host_blend) + again
    if cal.profile:
        ratio = _profiled(cal, tokens, model.dim, layouts.tp)
        forward, backward = forward * ratio, backward * ratio
    head = w.head_forward + w.head_backward
    pp_bytes = row / np.where(layouts.sequence, layouts.tp, 1)
    sent = links.send_time(g["pp"], pp_bytes) * (1 - cal.overlap_pp)
    passed, bubble = step_time(layouts, model.layers, forward, backward, head, w.embedding, sent)

    # gradients and weights between data-parallel ranks
    shared, experts = (
        np.maximum(a, b)
        for a, b in zip(weights(model, layouts, 0), weights(model, layouts, layouts.pp - 1), strict=True)
    )
    trained = np.where(np.asarray(model.frozen) > 0, 0.01, 1.0)
    all_dp = links.rank_group(cluster, layouts.dp * layouts.cp, layouts.tp, cal)
    expert_dp = links.rank_group(
        cluster, np.maximum(layouts.dp * layouts.cp * layouts.tp / layouts.ep, 1), layouts.ep, cal
    )
    sharded = links.rank_group(cluster, layouts.dp_shard * layouts.cp, layouts.tp, cal)
    grad, weight = gradient_bytes(layouts, model, cal), weight_bytes(layouts, size)
    z = layouts.zero
    back = np.where(z >= 1, weight, grad)
    flat = links.all_gather_time(all_dp, shared * grad * trained) + links.all_gather_time(
        all_dp, shared * back * trained
    )
    flat = (
        flat
        + links.all_gather_time(expert_dp, experts * grad * trained)
        + links.all_gather_time(expert_dp, experts * back * trained)
    )
    gathers = links.all_gather_time(sharded, shared * weight) + links.all_gather_time(expert_dp, experts * weight)
    scatter = links.all_gather_time(sharded, shared * grad * trained) + links.all_gather_time(
        expert_dp, experts * grad * trained
    )
    between = np.where(
        layouts.dp_replicate > 1,
        links.all_reduce_time(g["dp_replicate"], (shared + experts) / layouts.dp_shard * grad * trained),
        0,
    )
    stage = here * (forward + backward)
    z3 = count * _exposed(2 * gathers + scatter, stage, cal.overlap_dp) + _exposed(between, stage, cal.overlap_dp)
    z2 = count * _exposed(scatter, stage, cal.overlap_dp) + _exposed(gathers + between, stage, cal.overlap_dp)
    z1 = _exposed(flat, stage, cal.overlap_dp)
    coded = (shared + experts) * trained * encoding_bytes(layouts) / (cluster.memory_gb_s * 1e9 * MEMORY_SHARE)
    coded = coded * np.where(z >= 2, count, 1)
    dp_time = np.where(layouts.dp * layouts.cp > 1, np.select([z == 3, z == 2], [z3, z2], z1) + coded, 0.0)

    # the optimizer reads gradients and moves its state once
    cut = np.where(z > 0, layouts.dp_shard * layouts.cp, 1)
    owned = (shared / cut + experts / np.where(z > 0, np.maximum(cut * layouts.tp / layouts.ep, 1), 1)) * trained
    state = owned * (2 * cal.moment_bytes + 2 * cal.master_bytes + cal.gradient_bytes + size)
    offloaded = layouts.offload == OFFLOADS.index("optimizer")
    optimizer = cal.optimizer * state / (cluster.memory_gb_s * 1e9 * MEMORY_SHARE)
    optimizer = np.where(offloaded, owned * (4 + size) / (cluster.host_gb_s * 1e9) + owned * 30 / 50e9, optimizer)
    moved_out = np.where(
        layouts.offload == OFFLOADS.index("activations"), 2 * row * here * count / (cluster.host_gb_s * 1e9), 0
    )
    step = np.full(len(layouts), cal.step_ms * 1e-3)
    nodes = np.maximum(1, layouts.world / cluster.node_size)
    wait = cal.jitter * np.log2(nodes)
    total = (passed + dp_time + optimizer + moved_out + step) * (1 + wait)

    # breakdown of the time; a block's communication counts only as far as it makes the block longer
    f_x, b_x = np.minimum(1, forward / np.maximum(gpu_f, 1e-30)), 1.0
    blocks = count * here
    passes = 2 + np.where(full, again_share, 0)
    time = {
        "tp": blocks * passes * tp_one * f_x * b_x,
        "cp": blocks * (cp_f + cp_b + np.where(full, cp_f * again_share, 0)),
        "ep": blocks * passes * ep_one,
        "pp_bubble": bubble,
        "pp_send": np.where(layouts.pp > 1, 2 * sent * (count * layouts.virtual_stages + layouts.pp - 1), 0.0),
        "dp": dp_time, "optimizer": optimizer, "offload": moved_out, "data": 0 * step,
        "host": step + np.maximum(0, blocks * (forward + backward - np.maximum(gpu_f, 0) - gpu_b - again_gpu)),
        "waiting": total - total / (1 + wait),
    }  # fmt: skip
    time = {"compute": total - sum(time.values()), **time}

    held = framework_memory(model, layouts, cal) if memory is None else memory
    parts = {name: bytes_ / GIB for name, bytes_ in held.items()}
    peak_gib = sum(parts.values())
    own, _ = peak_flops_by_precision(cluster, layouts)
    flops = model.flops_per_token() * global_batch * model.seq_len / layouts.world
    redone = model.flops_per_token() / 3 * np.where(full, again_share, 0) * global_batch * model.seq_len / layouts.world
    rate = flops / total
    traffic = _traffic(model, layouts, shared, experts, row, weight, grad, passes, here, kv_bytes, routed, pp_bytes)
    return Estimates(
        step_time_s=total, low_s=total * (1 - cal.spread), high_s=total * (1 + cal.spread), memory=parts,
        peak_gib=peak_gib, fits=peak_gib <= cluster.memory_gib * cal.usable, time=time, bytes=traffic,
        level_bytes=_by_level(g, traffic), tflops=rate / 1e12, mfu=rate / own, hfu=(flops + redone) / total / own,
    )  # fmt: skip


def _traffic(
    model: ModelFacts, layouts: Layouts, shared: Size, experts: Size, row: Size, size: Size, grad: Size, passes: Size,
    here: Size, kv_bytes: Size, routed: Size, pp_bytes: Size,
) -> dict[str, Any]:  # fmt: skip
    """Bytes a rank passes to the collectives of each axis in a step."""
    count, z = layouts.accumulation, layouts.zero
    owned = shared + experts
    gathered = np.choose(np.clip(z, 0, 3), [0 * size, size, size, 2 * count * size])
    scattered = np.choose(np.clip(z, 0, 3), [0 * grad, grad, count * grad, count * grad])
    share = model.moe_layers / model.layers
    return {
        "dp_shard": np.where(layouts.dp_shard > 1, owned * (gathered + scattered), 0.0),
        "dp_replicate": np.where(layouts.dp_replicate > 1, owned / np.where(z > 0, layouts.dp_shard, 1) * grad, 0.0),
        "cp": np.where(layouts.cp > 1, 3 * (layouts.cp - 1) * kv_bytes * here * count, 0.0),
        "tp": np.where(layouts.tp > 1, 2 * passes * row * here * count * np.where(layouts.sequence, 2, 1), 0.0),
        "ep": np.where(layouts.ep > 1, 2 * passes * share * routed * here * count, 0.0),
        "pp": np.where(layouts.pp > 1, 2 * layouts.virtual_stages * pp_bytes * count, 0.0),
    }  # fmt: skip


def _by_level(g: dict[str, links.Group], traffic: dict[str, Size]) -> dict[str, Size]:
    """Bytes sent inside a node and over the network."""
    out = {"node": 0.0, "network": 0.0}
    for axis, bytes_ in traffic.items():
        leaves = g[axis].across / np.maximum(g[axis].inside, 1)
        out["network"] = out["network"] + bytes_ * leaves
        out["node"] = out["node"] + bytes_ * np.where(g[axis].inside > 1, 1.0, 0.0) * (1 - leaves)
    return out
