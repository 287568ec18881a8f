"""Time of a block: computing (a roofline for each matrix product, attention, memory-bound operations) and messages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.planner.calibration import Calibration
from weft.planner.model.cluster_facts import ClusterFacts
from weft.planner.model.model_facts import ModelFacts, Size
from weft.planner.search.candidates import CP_STYLES, PRECISIONS, Layouts
from weft.planner.time import collectives as links

TILE_ELEMENTS = 128 * 128
"""Output elements of a matrix product that one core computes at once."""
TILE_ALIGNMENT = 64
MEMORY_SHARE = 0.85
"""Share of the peak memory bandwidth that a large copy reaches."""
SCORE_BYTES = 12
"""Bytes moved per score by unfused attention in the forward pass."""

LOGIT_BYTES = 6
"""Bytes moved per logit by the loss in each pass."""


@dataclass(frozen=True)
class ComputeTime:
    """Seconds of one microbatch on one rank, without communication and without waiting for the host."""

    forward: Size
    """One block."""
    backward: Size
    attention: Size
    """The part of forward that overlaps with context-parallel communication."""
    weights: Size
    """The part of backward that gradients of weights take: as long as the products of forward."""
    inner: Size
    """The part of forward that selective recompute repeats."""
    head_forward: Size
    head_backward: Size
    coding: Size
    """Encoding of what is saved in fp8, and as much for decoding it."""
    embedding: Size


def peak_flops_by_precision(cluster: ClusterFacts, layouts: Layouts) -> tuple[Size, Size]:
    """Peak FLOP/s of the layouts' precision, and of operations that stay in 16 bits under fp8."""
    table = [np.asarray(cluster.peak_tflops[name], float) + 0.0 * layouts.tp for name in PRECISIONS]
    own = np.choose(layouts.precision, table) * 1e12
    wide = np.where(layouts.precision == PRECISIONS.index("fp8"), table[1] * 1e12, own)
    return own, wide


def compute_time(model: ModelFacts, cluster: ClusterFacts, layouts: Layouts, cal: Calibration) -> ComputeTime:
    tokens = layouts.microbatch * model.seq_len / layouts.cp
    tp = layouts.tp
    own, wide = peak_flops_by_precision(cluster, layouts)
    low = np.where(own > wide, cal.low_precision, 1.0)
    fast, plain = own * cluster.reach * cal.matmul * low, wide * cluster.reach * cal.matmul
    memory = cluster.memory_gb_s * 1e9 * MEMORY_SHARE
    size = layouts.element_bytes
    tiles = cluster.units * TILE_ELEMENTS

    def product(rows: Size, out: Size, inner: Size, speed: Size, together: Size = 1) -> Size:
        """Seconds of one product; `together` equal ones fill the device at once."""
        rows, out, inner = np.maximum(rows, 1e-9), np.maximum(out, 1e-9), np.maximum(inner, 1e-9)
        uneven = (np.mod(out, TILE_ALIGNMENT) > 0) | (np.mod(inner, TILE_ALIGNMENT) > 0)
        loss = 1 + cal.odd * uneven + cal.wave * tiles / (rows * out * together) + cal.depth / inner
        moved = size * (rows * out + rows * inner + out * inner)
        return np.maximum(2 * rows * out * inner / speed * loss, moved / memory)

    def both(rows: Size, out: Size, inner: Size, speed: Size, together: Size = 1) -> tuple[Size, Size]:
        """Forward, and backward: the gradient of the input and that of the weights."""
        weights = np.where(np.asarray(model.frozen) > 0, 0.0, product(out, inner, rows, speed, together))
        return product(rows, out, inner, speed, together), product(rows, inner, out, speed, together) + weights

    q, kv = model.q_width, model.kv_width
    latent = np.asarray(model.kv_rank) > 0
    into = np.where(
        latent, model.attention_weights / np.maximum(model.dim, 1) - model.heads * model.head_dim, q + 2 * kv
    )
    has_attention = np.asarray(model.heads) > 0
    qkv_f, qkv_b = both(tokens, into / tp, model.dim, fast)
    out_f, out_b = both(tokens, model.dim, model.heads * model.head_dim / tp, fast)
    up_f, up_b = both(tokens, np.maximum(model.gates, 1) * model.ffn / tp, model.dim, fast)
    down_f, down_b = both(tokens, model.dim, model.ffn / tp, fast)
    cross = 1 + np.asarray(model.cross_share)
    qkv_f, qkv_b, out_f, out_b = (part * cross for part in (qkv_f, qkv_b, out_f, out_b))
    two = np.asarray(model.gates) > 0  # an MLP's layer is one square product, not two
    share = model.moe_layers / model.layers
    mlp_f = up_f + np.where(two, down_f, 0.0)
    mlp_b = up_b + np.where(two, down_b, 0.0)
    moe_f = moe_b = np.zeros(len(layouts))
    if np.any(np.asarray(model.experts) > 0):
        here = np.maximum(model.experts, 1) / layouts.ep
        rows = tokens / tp * model.top_k
        at_once = here if cal.grouped else 1
        routed = (fast if cal.low_experts else plain) * cal.experts
        each = [
            both(rows / here, model.gates * model.moe_ffn, model.dim, routed, at_once),
            both(rows / here, model.dim, model.moe_ffn, routed, at_once),
            both(tokens, np.maximum(model.gates, 1) * model.shared_ffn / tp, model.dim, fast),
            both(tokens, model.dim, model.shared_ffn / tp, fast),
        ]
        shared = np.asarray(model.shared_ffn) > 0
        moe_f = here * (each[0][0] + each[1][0]) + np.where(shared, each[2][0] + each[3][0], 0)
        moe_b = here * (each[0][1] + each[1][1]) + np.where(shared, each[2][1] + each[3][1], 0)
    # attention itself
    seen = np.where((np.asarray(model.causal) > 0) & (cal.fused > 0), 0.5, 1.0)
    scores = 2 * tokens * model.seq_len * model.heads / tp * cross * model.attended
    flops = scores * (2 * model.head_dim + model.rope_dim) * seen
    fill = 1 + cal.wave * cluster.units / np.maximum(tokens / 128 * model.heads / tp, 1e-9)
    narrow = np.maximum(model.head_dim, 1) / (np.maximum(model.head_dim, 1) + 24) * (152 / 128)
    fused_f = flops / (wide * cluster.reach * cal.attention * narrow) * fill
    split_f = flops / plain * (1 + cal.depth / np.maximum(model.head_dim, 1)) * fill
    written = scores / 2 * SCORE_BYTES / memory * cal.traffic
    ragged = 1 + 4 * cal.odd * (np.mod(model.head_dim, 8) > 0)
    attention_f = ragged * np.where(has_attention, fused_f if cal.fused > 0 else split_f + written, 0.0)
    attention_b = attention_f * (2.5 if cal.fused > 0 else 2.0)
    # memory-bound operations: norms and residuals, rotary embeddings, activation functions
    whole = np.where(np.asarray(model.norm_rows) > 0, 10.0, 0.0) * model.dim / np.where(layouts.sequence, tp, 1)
    hidden = (1 - share) * model.ffn + share * (model.top_k * (model.moe_ffn + 2 * model.dim) + model.shared_ffn)
    cut = (2 * q + (model.gates + 1) * hidden) / tp + 2 * model.kv_width_on(tp)
    moved_f = tokens * size * (whole + cut) / memory * cal.traffic
    forward = np.where(has_attention, qkv_f + out_f, 0) + (1 - share) * mlp_f + share * moe_f + attention_f + moved_f
    backward = (
        np.where(has_attention, qkv_b + out_b, 0) + (1 - share) * mlp_b + share * moe_b + attention_b + 2 * moved_f
    )
    rows = tokens * model.head_share
    head_low = (np.asarray(model.head_low) > 0) & (model.head_low % tp == 0)
    head_speed = np.where(head_low, fast, plain) * np.where(tp == 1, cal.head_whole, 1.0)
    head_f, head_b = both(rows, model.vocab / tp, model.dim, head_speed)
    logits = rows * model.vocab / (1 if cal.logits_whole else tp) * LOGIT_BYTES / memory * cal.traffic
    has_head = np.asarray(model.vocab) > 0
    stored = 4 * model.dim / np.where(layouts.sequence, tp, 1) + 2 * (q + np.maximum(model.gates, 1) * hidden) / tp
    stored = stored + 2 * model.kv_width_on(tp)
    return ComputeTime(
        forward=forward,
        backward=backward,
        attention=attention_f,
        weights=np.where(np.asarray(model.frozen) > 0, 0.0, forward - attention_f - moved_f),
        inner=np.where(
            cal.fused > 0,
            cal.selective * moved_f + cal.selective_products * (forward - attention_f - moved_f),
            attention_f,
        ),
        head_forward=np.where(has_head, head_f + logits, 0.0),
        head_backward=np.where(has_head, head_b + logits, 0.0),
        coding=model.coded * tokens * stored * (size + 1) / memory * cal.traffic,
        embedding=np.where(has_head, tokens * model.dim * size * 4 / memory, 0.0),
    )


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
