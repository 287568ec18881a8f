"""Compute time of a block: a roofline for each matrix product, attention, and memory-bound operations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.planner.calibration import Calibration
from weft.planner.model.cluster_facts import ClusterFacts
from weft.planner.model.model_facts import ModelFacts, Size
from weft.planner.search.candidates import PRECISIONS, Layouts

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
