"""Time of one block for one microbatch: its compute, the communication inside it, and the host that launches it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.planner.calibration import Calibration
from weft.planner.model.cluster_facts import ClusterFacts
from weft.planner.model.model_facts import ModelFacts, Size
from weft.planner.search.candidates import CP_STYLES, PRECISIONS, Layouts
from weft.planner.time import collectives as links
from weft.planner.time.compute import compute_time

PROFILE_WIDTH = 0.25
"""Width, in doublings of a shape's sides, of the kernel that interpolates measured blocks."""
SLOW_KERNEL_LAUNCHES = 1.3
"""Host time of a block whose attention scores use the slower kernels, over one with fast kernels."""


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block for one microbatch, and of what is outside the blocks."""

    forward: Size
    backward: Size
    """Without recompute."""
    weights: Size
    """The part of backward that gradients of weights take."""
    again: Size
    """What selective recompute repeats; full recompute repeats `forward`."""
    gpu_forward: Size
    """Forward without waiting for the host."""
    gpu_backward: Size
    gpu_again: Size
    tp: Size
    """Exposed tensor-parallel communication of one pass."""
    cp_forward: Size
    cp_backward: Size
    ep: Size
    coding: Size
    """Encoding of the saved activations in forward, and as much in backward; with full recompute there is none."""
    head: Size
    """Both passes."""
    head_again: Size
    """What full recompute repeats of it."""
    embedding: Size
    row_bytes: Size
    """Bytes of the residual stream."""

    @classmethod
    def columns(cls, layouts: Layouts) -> tuple[Size, ...]:
        """The settings that a block's time depends on."""
        return (
            layouts.microbatch, layouts.tp, layouts.sequence, layouts.cp, layouts.cp_style, layouts.ep,
            layouts.precision,
        )  # fmt: skip


def exposed(communication: Size, window: Size, overlap: Size) -> Size:
    """Communication that is not hidden behind `window` seconds of compute."""
    return communication - overlap * np.minimum(communication, window)


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


def block_time(model: ModelFacts, cluster: ClusterFacts, layouts: Layouts, cal: Calibration) -> BlockTime:
    w = compute_time(model, cluster, layouts, cal)
    ones = np.ones(len(layouts))
    tokens = layouts.microbatch * model.seq_len / layouts.cp
    size = layouts.element_bytes
    row = tokens * model.dim * size
    # tensor parallel: two sums forward and two backward, as large as the residual stream
    near_tp = links.rank_group(cluster, layouts.tp, ones, cal)
    kv = model.kv_width_on(layouts.tp)
    # keys and values of which each rank computes a part of a head are gathered, and their gradients are scattered
    shared = (np.asarray(model.kv_heads) > 0) & (layouts.tp > model.kv_heads)
    parts = np.where(shared, 2 * links.all_gather_time(near_tp, tokens * model.kv_width * size), 0.0)
    tp = (2 * links.all_reduce_time(near_tp, row) + parts) * (1 - cal.overlap_tp)
    head = w.head_forward
    if cal.logits_whole:
        head = head + links.all_gather_time(near_tp, tokens * model.head_share * model.vocab * size)
    # context parallel: keys and values go round a ring, or heads are exchanged
    near = links.rank_group(cluster, layouts.cp, layouts.tp, cal)
    # with a sliding window, only from the chunks before that it reaches, of two a rank
    reached = np.minimum(layouts.cp - 1, np.ceil(model.window * 2 * layouts.cp))
    hops = (1 - np.asarray(model.windowed)) * (layouts.cp - 1) + model.windowed * reached
    ring = hops * links.send_time(near, 2 * tokens * kv * size)
    swap = links.all_to_all_time(near, tokens * 2 * (model.q_width / layouts.tp + kv) * size)
    cp = np.where(layouts.cp > 1, np.where(layouts.cp_style == CP_STYLES.index("ring"), ring, swap), 0.0)
    # with an encoder and a decoder all keys are needed at once, and again in cross attention
    cross = np.asarray(model.cross_share)
    hidden, cp = np.where(cross > 0, 0.0, cal.overlap_cp), (1 + cross) * cp
    cp_f = exposed(cp, w.attention, hidden)
    cp_b = exposed(np.where(cross > 0, 1, 2) * cp, 2.5 * w.attention, hidden)
    # expert parallel: tokens go to their experts and back
    share = model.moe_layers / model.layers
    routed = tokens / layouts.tp * model.top_k * model.dim * size
    experts = links.all_to_all_time(links.rank_group(cluster, layouts.ep, ones, cal), routed, model.top_k)
    ep = share * 2 * experts * (1 - cal.overlap_ep)
    casts = np.where(layouts.precision == PRECISIONS.index("fp8"), cal.host_fp8, 1.0)
    routing = cal.host_routing_us + cal.host_moe_us * np.maximum(model.experts, 1) / layouts.ep
    host = (casts * cal.host_us + share * routing) * 1e-6
    host = host * (1 + cross) * np.where(np.asarray(model.frozen) > 0, cal.host_adapters, 1.0)
    if cal.score_batch:
        odd = np.mod(layouts.microbatch * model.heads / layouts.tp, cal.score_batch) != 0
        host = host * np.where(odd, SLOW_KERNEL_LAUNCHES, 1.0)
    gpu_f, gpu_b = w.forward + tp + cp_f + ep, w.backward + tp + cp_b + ep
    ratio = _profiled(cal, tokens, model.dim, layouts.tp) if cal.profile else 1.0
    forward = _smooth_max(gpu_f, host, cal.host_blend)
    backward = _smooth_max(gpu_b, host * cal.host_backward, cal.host_blend)
    again = w.inner
    if cal.host_selective_us:
        launches = host * (1 + cal.host_backward) + share * cal.host_selective_us * 1e-6
        again = np.maximum(again, _smooth_max(gpu_f + gpu_b + again, launches, cal.host_blend) - forward - backward)
    return BlockTime(
        forward=forward * ratio,
        backward=backward * ratio,
        weights=w.weights * ratio,
        again=again * ratio, gpu_forward=gpu_f, gpu_backward=gpu_b, gpu_again=w.inner, tp=tp, cp_forward=cp_f,
        cp_backward=cp_b, ep=ep, coding=w.coding, head=head + w.head_backward, head_again=head * cal.head_again,
        embedding=w.embedding, row_bytes=row,
    )  # fmt: skip
