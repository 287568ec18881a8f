"""Memory of a rank of a published framework by component, with the framework's calibration.

Weights, gradients and moments: ZeRO (Rajbhandari et al. 2020, section 3). Activations: Korthikanti et al. 2022,
equations 1 to 6, written out for any feed-forward width, gates and grouped keys. Waiting microbatches of a pipeline:
Narayanan et al. 2021 and Qi et al. 2023.
"""

from __future__ import annotations

import numpy as np

from weft.hardware.probe import GIB
from weft.job.compression import COMPRESSORS
from weft.planner.calibration import Calibration
from weft.planner.memory.peak_walk import PARTS
from weft.planner.model.model_facts import ModelFacts, Size
from weft.planner.schedules.known_schedules import SCHEDULE_NAMES, SCHEDULES
from weft.planner.search.candidates import OFFLOADS, RECOMPUTES, Layouts
from weft.planner.time.compression import residual_bytes
from weft.planner.time.pipeline import stage_layers

MAX_BUCKET_ELEMENTS = 1e8
"""Most elements in gradient buckets at once: two buckets of the usual 25 to 200 MB."""
ADAPTER_SHARE = 0.01
"""Trained weights of an adapter run, as a share of all."""


def framework_memory(model: ModelFacts, layouts: Layouts, cal: Calibration) -> dict[str, Size]:
    """Bytes by component of the first or the last rank of a pipeline, whichever holds more."""
    first, last = stage_memory(model, layouts, cal, 0), stage_memory(model, layouts, cal, layouts.pp - 1)
    heavier = sum(last.values()) > sum(first.values())
    return {part: np.where(heavier, last[part], first[part]) for part in PARTS}


def weights(model: ModelFacts, layouts: Layouts, index: Size) -> tuple[Size, Size]:
    """Weights of pipeline rank `index` on one rank of tp: without experts, and its experts."""
    layers = _layers(model, layouts, index)
    first, last = index == 0, index == layouts.pp - 1
    has_head = np.where(layouts.back_and_forth & (layouts.pp > 1), first, last)
    ends = np.where(first, model.embedding, 0) + np.where(has_head, model.head, 0)
    # tied weights stand on both ends of a pipeline
    ends = ends + np.where(has_head & ~(first & last), model.tied * model.vocab * model.dim, 0)
    cut = np.maximum(layouts.ep, np.minimum(layouts.tp, np.maximum(model.experts, 1)))
    return (layers * model.block_shared + ends) / layouts.tp, layers * model.block_experts / cut


def expert_tp(layouts: Layouts, cal: Calibration) -> Size:
    """Ranks of tp that an expert's matrices are cut over, as far as there are ranks beside those of ep."""
    ranks = np.maximum(layouts.dp * layouts.cp * layouts.tp // layouts.ep, 1)
    return np.where(layouts.ep > 1, np.minimum(layouts.tp, ranks), 1) if cal.experts_over_tp else 1


def _layers(model: ModelFacts, layouts: Layouts, index: Size) -> Size:
    most, end = stage_layers(model.layers, layouts.pp * layouts.virtual_stages)
    last = (index == layouts.pp - 1) & (layouts.pp > 1)
    return np.where(layouts.pp > 1, (layouts.virtual_stages - 1) * most + np.where(last, end, most), model.layers)


def stage_memory(model: ModelFacts, layouts: Layouts, cal: Calibration, index: Size) -> dict[str, Size]:
    """Bytes by component of pipeline rank `index`."""
    shared, experts = weights(model, layouts, index)
    experts = experts / expert_tp(layouts, cal)
    fp32 = layouts.precision == 0
    compute = np.where(fp32, 4.0, cal.parameter_bytes)
    master = np.where(fp32, 0.0, cal.master_bytes)
    zero = np.where((layouts.zero == 3) & (layouts.accumulation > 1) & (cal.accumulates_whole > 0), 1, layouts.zero)
    shard = np.where(zero > 0, layouts.dp_shard * layouts.cp, 1)
    expert_shard = np.maximum(shard * layouts.tp / layouts.ep / expert_tp(layouts, cal), 1)
    trained = np.where(np.asarray(model.frozen) > 0, ADAPTER_SHARE, 1.0)
    z3, z2 = zero == 3, zero >= 2

    def cut(bytes_each: Size, when: Size) -> Size:
        return shared * bytes_each / np.where(when, shard, 1) + experts * bytes_each / np.where(when, expert_shard, 1)

    # under zero 3 the shards are the master weights; whole weights exist only while they are gathered
    frozen = np.asarray(model.frozen) > 0
    compute = np.where(frozen, model.frozen_bytes, compute)
    parameters = np.where(z3, cut(np.where((master > 0) & ~frozen, 0.0, compute), True), cut(compute, False))
    # embedding and head are not quantized
    outside = (shared - _layers(model, layouts, index) * model.block_shared / layouts.tp) * frozen
    parameters = parameters + outside * (2.0 - compute) / np.where(z3, shard, 1)
    offloaded = layouts.offload == OFFLOADS.index("optimizer")
    # with the optimizer, sharded gradients go to the host as soon as they are reduced (ZeRO-Offload)
    gradients = cut(cal.gradient_bytes, z2) * trained * np.where(offloaded & z2, 0.0, 1.0)
    optimizer = cut((master + cal.moment_bytes) * trained, zero > 0) * np.where(offloaded, 0.0, 1.0)
    ends = np.where(layouts.pp > 1, 0, model.embedding)
    live = 2 * np.maximum(model.block_shared + model.block_experts / layouts.ep, ends) / layouts.tp
    if cal.gather_limit:
        live = np.minimum(live, np.maximum(cal.gather_limit, model.dim * model.ffn / layouts.tp))
    gathered = np.where(z3 & (shard > 1), live * (compute + trained * cal.gradient_bytes / 2), 0.0)
    # weights that every rank has whole before they are sharded
    loaded = np.where(z3 & (shard > 1), cut(compute, False), 0.0) * cal.loads_whole
    bucket = np.where(layouts.dp > 1, np.minimum(shared, MAX_BUCKET_ELEMENTS) * cal.gradient_bytes, 0.0)
    bucket = bucket * np.where(layouts.compression == COMPRESSORS.names().index("none"), 1.0, 1.25)
    bucket = bucket + (shared + experts) * trained * residual_bytes(layouts)
    activations = activation_bytes(model, layouts, cal, _layers(model, layouts, index), index)
    tokens = layouts.microbatch * model.seq_len / layouts.cp * model.head_share
    count = tokens * model.vocab / layouts.tp
    count = np.minimum(count, cal.loss_chunk) if cal.loss_chunk else count
    gathered_logits = np.where(layouts.tp > 1, cal.logits_whole * layouts.tp, 0)
    logits = np.where(index == layouts.pp - 1, count * (cal.logits + gathered_logits), 0.0)
    step = gradients + optimizer + activations + logits + gathered + bucket
    gathered = gathered + np.maximum(0.0, loaded - step)
    held = parameters + step + np.maximum(0.0, loaded - step)
    return {
        "parameters": parameters, "gradients": gradients, "optimizer": optimizer, "activations": activations,
        "communication": gathered + bucket, "temporary": logits, "runtime": cal.context_gib * GIB + cal.fragment * held,
    }  # fmt: skip


def microbatches_in_flight(model: ModelFacts, layouts: Layouts, index: Size) -> Size:
    """Microbatches whose activations the pipeline's rank `index` holds at once, each over all of its blocks."""
    pp, count, v = layouts.pp, layouts.accumulation, layouts.virtual_stages
    each = [np.asarray(SCHEDULES[name].in_flight(pp, v, index, count), float) + 0 * pp for name in SCHEDULE_NAMES]
    held = np.choose(layouts.schedule, each) * model.in_flight
    return np.where(pp > 1, np.minimum(held, count), 1.0)


def activation_bytes(model: ModelFacts, layouts: Layouts, cal: Calibration, layers: Size, index: Size) -> Size:
    """Kept from forward to backward, over this stage's blocks and all waiting microbatches."""
    tokens = layouts.microbatch * model.seq_len / layouts.cp
    tp = layouts.tp
    size = layouts.element_bytes
    cut = np.where(layouts.sequence, tp, 1)
    share = model.moe_layers / model.layers
    q = model.heads * (model.head_dim + model.rope_dim)
    kv = np.where(np.asarray(model.kv_rank) > 0, model.heads, model.kv_heads) * model.head_dim
    whole = np.where(np.asarray(model.norm_rows) > 0, cal.stream, 0.0) * model.dim / cut
    # the inputs of the first products of attention and of the feed-forward layer
    gathered = cal.gathered_inputs * np.where(layouts.sequence, 2 * model.dim * (1 - 1 / tp), 0.0)
    hidden = (1 - share) * model.ffn + share * (model.top_k + 0.0) * model.moe_ffn + share * model.shared_ffn
    routed = share * model.top_k * 2 * model.dim / tp
    # a product with a frozen matrix does not keep its input; some adapters keep the output of every product
    frozen = np.asarray(model.frozen) > 0
    wide = np.where(frozen, 2 * model.gates - 1, np.maximum(model.gates + 1, 2)) * hidden
    outputs = model.kept_outputs * (q + 2 * kv + 2 * model.dim + model.gates * hidden)
    inner = (2 * q + 2 * kv + wide + outputs) / tp
    scores = 0.0 if cal.fused > 0 else 5.0 / 2 * model.heads / tp * model.seq_len
    block = size * tokens * (whole + inner + routed)
    with_scores = block + size * tokens * (scores + gathered)
    entry = size * tokens * model.dim / cut
    # full recompute keeps each block's input, and one block's whole while it is computed again
    again = np.where(
        layouts.recompute_blocks >= 0, np.minimum(np.ceil(layouts.recompute_blocks / layouts.pp), layers), layers
    )
    some = block - cal.selective_products * (block - entry)  # the products that are computed again are not kept
    kept = [
        layers * with_scores,
        np.where(layouts.recompute_blocks >= 0, (layers - again) * with_scores, 0) + again * some,
        (layers - again) * with_scores + again * entry,
    ]
    held = np.choose(layouts.recompute, [np.asarray(k, float) + 0 * tp for k in kept])
    working = np.where(layouts.recompute == RECOMPUTES.index("full"), with_scores, 0.0) + 2 * entry
    working = working + size * tokens * gathered  # their gradients
    parked = layouts.offload == OFFLOADS.index("activations")
    held = np.where(parked, 2 * block, held)
    if cal.host_checkpoints:
        held = np.where((layouts.zero == 3) & (layouts.recompute == RECOMPUTES.index("full")), 0.0, held)
    return cal.activation * (held * microbatches_in_flight(model, layouts, index) + working)
