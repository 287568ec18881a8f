"""Effect of compression on an estimate: bytes sent, bytes moved to encode, and residual memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from weft.job.compression import COMPRESSORS, Compression, CompressionKind, parse_compression, share_of
from weft.planner.calibration import Calibration
from weft.planner.engine_constants import GRADIENT_ALIGNMENT, MIN_COMPRESSED_ELEMENTS
from weft.planner.model.model_facts import ModelFacts, Size
from weft.planner.model.parameters import ParamShard, Weight
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts
from weft.planner.time.allreduce_messages import by_messages, ranks_on_node, sent_of
from weft.planner.time.compression_warmup import (
    WARMUP_COMPRESSION,
    pays_low_rank,
    rank_at,
    setting_at,
    thin_pays,
)

DEFAULT_POWERSGD_RANK = 4


def _chosen(layouts: Layouts, value: Callable[[CompressionKind], Size]) -> Size:
    return np.choose(layouts.compression, [np.asarray(value(entry)) + 0.0 * layouts.tp for entry in COMPRESSORS])


def gradient_bytes(layouts: Layouts, model: ModelFacts, cal: Calibration) -> Size:
    """Bytes per gradient value in collectives."""

    def size(entry: CompressionKind) -> Size:
        if entry.name == "none":
            return cal.reduce_bytes
        return 8.0 * DEFAULT_POWERSGD_RANK / np.asarray(model.dim) if entry.low_rank else entry.gradient

    return _chosen(layouts, size)


def weight_bytes(layouts: Layouts, size: Size) -> Size:
    """Bytes per gathered weight value; `size` without compression."""
    return np.minimum(size, _chosen(layouts, lambda entry: entry.weight))


def encoding_bytes(layouts: Layouts) -> Size:
    """Memory traffic per encoded gradient value."""
    return _chosen(layouts, lambda entry: entry.encoding)


def residual_bytes(layouts: Layouts) -> Size:
    """Residual bytes per gradient value, where more than one rank sums."""
    return np.where(layouts.dp * layouts.cp > 1, _chosen(layouts, lambda entry: entry.residual), 0.0)


def per_number(setting: Compression) -> float:
    """Bytes per gradient value under a setting."""
    return 6 * share_of(setting) if setting.entry.share is not None else setting.entry.gradient


def is_compressed(plan: Plan, weight: Weight) -> bool:
    """Whether a weight's gradient is compressed under a plan."""
    return compresses(plan.compression, weight) and (plan.tp == 1 or weight.cut is not None or weight.partial)


def compresses(compression: str, weight: Weight) -> bool:
    """Whether a setting compresses the gradients of a weight that tp does not exclude."""
    setting = parse_compression(compression)
    if setting.kind == "none" or setting.entry.adaptive:
        return False
    if len(weight.shape) < 2 or math.prod(weight.shape) < MIN_COMPRESSED_ELEMENTS:
        return False
    rows, columns = weight.shape[0], math.prod(weight.shape[1:])
    return not setting.entry.low_rank or pays_low_rank(rows, columns, int(setting.number))


def replica_bytes(plan: Plan, shards: Iterable[ParamShard], ranks: int, rank: int, at: float) -> Counter[str]:
    """Bytes that one of the replicas' ranks sends to sum gradients of unsharded weights, at an age of the run; adaptive
    counts as uncompressed."""
    out: Counter[str] = Counter()
    wanted = parse_compression(plan.compression)
    setting = setting_at(wanted, at, ranks)
    if by_messages(plan.allreduce):
        times = sent_of(plan.allreduce, ranks, rank, ranks_on_node(plan))
        size = sum(
            shard.whole * per_number(setting) if is_compressed(plan, shard.weight) else _aligned(shard.whole)
            for shard in shards
        )
        return Counter({"send": round(times * size), "recv": round(times * size)})
    for shard in shards:
        if not is_compressed(plan, shard.weight):
            out["all_reduce"] += _aligned(shard.whole)
        elif thin := _thin(plan, wanted, shard, at):
            out["all_reduce"] += thin
            out["broadcast"] += _columns(plan, wanted, shard, at)
        else:
            _halves(out, _coded(setting), shard.whole, ranks)
    return out


def _aligned(numbers: int) -> int:
    """Bytes of a gradient in a bucket, in fp32."""
    return 4 * -(-numbers // GRADIENT_ALIGNMENT) * GRADIENT_ALIGNMENT


def _thin(plan: Plan, wanted: Compression, shard: ParamShard, at: float) -> int:
    """Bytes of PowerSGD's two low-rank matrices; 0 where a weight is not sent that way."""
    if not wanted.entry.low_rank:
        return 0
    shape = shard.weight.on_tp(plan.tp, 0)
    rows, columns, rank = shape[0], math.prod(shape[1:]), int(wanted.number)
    return 4 * rank_at(rank, rows, columns, at) * (rows + columns) if thin_pays(rank, [(rows, columns)], at) else 0


def _columns(plan: Plan, wanted: Compression, shard: ParamShard, at: float) -> int:
    """Bytes of the orthogonal matrix that the first rank sends to the others."""
    shape = shard.weight.on_tp(plan.tp, 0)
    return 4 * shape[0] * rank_at(int(wanted.number), shape[0], math.prod(shape[1:]), at)


def _coded(setting: Compression) -> Compression:
    return WARMUP_COMPRESSION if setting.entry.low_rank else setting


def _halves(out: Counter[str], setting: Compression, numbers: int, ranks: int) -> None:
    bytes_ = numbers * per_number(setting)
    if setting.entry.share is not None:
        out["all_gather"] += round(ranks * bytes_)
    else:
        out["all_to_all"] += round(bytes_)
        out["all_gather"] += round(bytes_)


def shard_bytes(
    plan: Plan, shards: Iterable[ParamShard], ways: int, times: tuple[int, int], width: int, at: float
) -> tuple[Counter[str], Counter[str]]:
    """The same under shards: over the ranks that cut, and over their replicas. `times` is how often weights are
    gathered and gradients summed in a step, `width` the bytes of a weight that computes."""
    cut: Counter[str] = Counter()
    across: Counter[str] = Counter()
    wanted = parse_compression(plan.compression)
    here, there = setting_at(wanted, at), setting_at(wanted, at, plan.dp_replicate)
    gathers, scatters = times
    for shard in shards:
        whole = shard.padded * ways
        if not is_compressed(plan, shard.weight):
            cut["all_gather"] += gathers * whole * width
            cut["reduce_scatter"] += scatters * whole * 4 * shard.weight.trained
            across["all_reduce"] += shard.padded * 4 * shard.weight.trained
            continue
        cut["all_gather"] += round(gathers * whole * min(width, wanted.entry.weight))
        if not shard.weight.trained:
            continue
        if thin := _thin(plan, wanted, shard, at):
            for axis in (cut, across):
                axis["all_reduce"] += scatters * thin
                axis["broadcast"] += scatters * _columns(plan, wanted, shard, at)
        else:
            cut["all_to_all"] += round(scatters * whole * per_number(_coded(here)))
            _halves(across, _coded(there), shard.padded, plan.dp_replicate)
    return cut, across if plan.dp_replicate > 1 else Counter()
