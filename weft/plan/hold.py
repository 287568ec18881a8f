"""What the fullest rank of a layout holds, part by part, in bytes.

Weights, gradients and moments: ZeRO (Rajbhandari et al. 2020, section 3). Activations: Korthikanti et al. 2022, equations
1 to 6, written out for any feed-forward width, gates and grouped keys. Waiting microbatches of a pipeline: Narayanan et
al. 2021 and Qi et al. 2023.
"""

from __future__ import annotations

import numpy as np

from weft.plan.calibration import Calibration
from weft.plan.facts import ModelFacts, Size
from weft.plan.layouts import COMPRESSIONS, OFFLOADS, RECOMPUTES, SCHEDULE_NAMES, Layouts
from weft.plan.pipeline import stage_layers

GIB = 2**30
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "reserve")


def hold(model: ModelFacts, layouts: Layouts, cal: Calibration) -> dict[str, Size]:
    """Bytes by part, of whichever of the first and the last stage holds more."""
    first, last = _stage(model, layouts, cal, 0), _stage(model, layouts, cal, 1)
    heavier = sum(last.values()) > sum(first.values())
    return {part: np.where(heavier, last[part], first[part]) for part in PARTS}


def weights(model: ModelFacts, layouts: Layouts, which: int) -> tuple[Size, Size]:
    """Weights of the first (0) or the last (1) stage on one rank: those all ranks share, and its experts."""
    most, end = stage_layers(model.layers, layouts.pp * layouts.virtual_stages)
    layers = np.where(which == 0, most, end) + (layouts.virtual_stages - 1) * most
    layers = np.where(layouts.pp > 1, layers, model.layers)
    one = layouts.pp == 1
    ends = np.where(one, model.embedding + model.head, model.embedding if which == 0 else model.head)
    # tied weights stand on both ends of a pipeline
    ends = ends + np.where((layouts.pp > 1) & (which == 1), model.tied * model.vocab * model.dim, 0)
    ends = ends + np.where(
        (layouts.pp > 1) & (which == 0) & (layouts.schedule == SCHEDULE_NAMES.index("zbv")), model.head, 0
    )
    return (layers * model.block_shared + ends) / layouts.tp, layers * model.block_experts / np.maximum(
        layouts.ep, np.minimum(layouts.tp, np.maximum(model.experts, 1))
    )


def _stage(model: ModelFacts, layouts: Layouts, cal: Calibration, which: int) -> dict[str, Size]:
    shared, experts = weights(model, layouts, which)
    most, end = stage_layers(model.layers, layouts.pp * layouts.virtual_stages)
    layers = np.where(layouts.pp > 1, np.where(which == 0, most, end), model.layers)
    fp32 = layouts.precision == 0
    compute = np.where(fp32, 4.0, cal.parameter_bytes)
    master = np.where(fp32, 0.0, cal.master_bytes)
    gradient = np.maximum(cal.gradient_bytes, 0) * np.ones(len(layouts))
    shard = np.where(layouts.zero > 0, layouts.dp_shard * layouts.cp, 1)
    expert_shard = np.maximum(shard * layouts.tp / layouts.ep, 1)
    trained = np.where(np.asarray(model.frozen) > 0, 0.02, 1.0)
    z3, z2 = layouts.zero == 3, layouts.zero >= 2

    def cut(bytes_each: Size, when: Size) -> Size:
        return shared * bytes_each / np.where(when, shard, 1) + experts * bytes_each / np.where(when, expert_shard, 1)

    # under zero 3 the shards are the masters; whole weights exist only while they are gathered
    parameters = np.where(z3, cut(np.where(master > 0, 0.0, compute), True), cut(compute, False))
    gradients = cut(gradient, z2) * trained
    moments = np.where(layouts.offload == OFFLOADS.index("optimizer"), 0.0, 1.0)
    optimizer = cut(master + cal.moment_bytes * trained, layouts.zero > 0) * moments
    unit = (
        np.maximum(model.block_shared + model.block_experts / layouts.ep, np.where(layouts.pp > 1, 0, model.embedding))
        / layouts.tp
    )
    gathered = np.where(z3 & (shard > 1), 2 * unit * (compute + gradient / 2), 0.0)
    bucket = np.where(layouts.dp > 1, np.minimum(shared * 4, 1e8 * 4), 0.0)
    bucket = bucket * np.where(layouts.compression == COMPRESSIONS.index("none"), 1.0, 1.25)
    activations = activation_bytes(model, layouts, cal, layers, which)
    tokens = layouts.microbatch * model.seq_len / layouts.cp * model.head_share
    rows = np.minimum(tokens, cal.loss_rows) if cal.loss_rows else tokens
    here = np.where((layouts.pp == 1) | (which == 1), 1.0, 0.0)
    logits = here * rows * model.vocab / layouts.tp * cal.logits
    held = parameters + gradients + optimizer + activations + logits + gathered + bucket
    return {
        "parameters": parameters, "gradients": gradients, "optimizer": optimizer, "activations": activations,
        "logits": logits, "communication": gathered + bucket, "reserve": cal.context_gib * GIB + cal.fragment * held,
    }  # fmt: skip


def waiting(layouts: Layouts, which: int) -> Size:
    """Microbatches whose activations one rank holds at once, in units of its whole share of the layers."""
    pp, count, v = layouts.pp, layouts.accumulation, layouts.virtual_stages
    deep = np.where(which == 0, pp, 1)
    turn = np.where(which == 0, pp * v + pp - 1, pp * (v - 1) + 1) / v
    table = {
        "1f1b": deep, "interleaved-1f1b": turn, "zb-h1": np.where(which == 0, pp, np.minimum(pp, 2)), "zbv": pp,
        "dualpipe-v": pp + 1, "gpipe": count, "naive": np.ones(len(layouts)),
    }  # fmt: skip
    held = np.choose(layouts.schedule, [np.asarray(table[name], float) + 0 * pp for name in SCHEDULE_NAMES])
    return np.where(pp > 1, np.minimum(held, count), 1.0)


def activation_bytes(model: ModelFacts, layouts: Layouts, cal: Calibration, layers: Size, which: int) -> Size:
    """Kept from forward to backward, over this stage's blocks and all waiting microbatches."""
    tokens = layouts.microbatch * model.seq_len / layouts.cp
    tp = layouts.tp
    size = np.where(layouts.precision == 0, 4.0, 2.0)
    cut = np.where(layouts.sequence, tp, 1)
    share = model.moe_layers / model.layers
    q = model.heads * (model.head_dim + model.rope_dim)
    kv = np.where(np.asarray(model.kv_rank) > 0, model.heads, model.kv_heads) * model.head_dim
    whole = np.where(np.asarray(model.norm_rows) > 0, 4.0, 0.0) * model.dim
    hidden = (1 - share) * model.ffn + share * (model.top_k + 0.0) * model.moe_ffn + share * model.shared_ffn
    routed = share * model.top_k * 2 * model.dim / tp
    inner = (2 * q + 2 * kv + np.maximum(model.gates + 1, 2) * hidden) / tp
    scores = 0.0 if cal.fused > 0 else 5.0 / 2 * model.heads / tp * model.seq_len
    block = size * tokens * (whole / cut + inner + routed)
    with_scores = block + size * tokens * scores
    entry = size * tokens * model.dim / cut
    # full recompute keeps each block's input, and one block's whole while it is computed again
    again = np.where(layouts.recompute_blocks >= 0, np.minimum(layouts.recompute_blocks, layers), layers)
    kept = [
        layers * with_scores,
        np.where(layouts.recompute_blocks >= 0, (layers - again) * with_scores, 0) + again * block,
        (layers - again) * with_scores + again * entry,
    ]
    held = np.choose(layouts.recompute, [np.asarray(k, float) + 0 * tp for k in kept])
    working = np.where(layouts.recompute == RECOMPUTES.index("full"), with_scores, 0.0) + 2 * entry
    held = np.where(layouts.offload == OFFLOADS.index("activations"), 2 * block, held)
    v = np.where(layouts.pp > 1, layouts.virtual_stages, 1)
    return cal.activation * (held * v * waiting(layouts, which) + working)
