"""What compression changes in an estimate: bytes that travel, bytes that encoding moves, bytes that are owed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from weft.job.compression import COMPRESSORS, Compression, Compressor, parse_compression, share_of
from weft.planner.calibration import Calibration
from weft.planner.model.facts import ModelFacts, Size
from weft.planner.model.parameters import Piece, Weight
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts
from weft.planner.time.compression_warmup import WARM, pays_low_rank, rank_at, setting_at, thin_pays

LEAST, ALIGN = 256, 64
"""Elements below which a weight is not compressed, and to which gradients in a bucket are aligned."""
LOW_RANK = 4


def _chosen(layouts: Layouts, value: Callable[[Compressor], Size]) -> Size:
    return np.choose(layouts.compression, [np.asarray(value(entry)) + 0.0 * layouts.tp for entry in COMPRESSORS])


def gradient_bytes(layouts: Layouts, model: ModelFacts, cal: Calibration) -> Size:
    """What a gradient's number travels as."""

    def size(entry: Compressor) -> Size:
        if entry.name == "none":
            return cal.reduce_bytes
        return 8.0 * LOW_RANK / np.asarray(model.dim) if entry.low_rank else entry.gradient

    return _chosen(layouts, size)


def weight_bytes(layouts: Layouts, size: Size) -> Size:
    """What a gathered weight travels as, of `size` bytes where it computes."""
    return np.minimum(size, _chosen(layouts, lambda entry: entry.weight))


def encoding_bytes(layouts: Layouts) -> Size:
    """Moved through memory for each gradient that is encoded."""
    return _chosen(layouts, lambda entry: entry.encoding)


def owed_bytes(layouts: Layouts) -> Size:
    """Kept for each gradient between steps, where more than one rank sums."""
    owed = _chosen(layouts, lambda entry: entry.residual)
    return np.where(layouts.dp * layouts.cp > 1, owed, 0.0)


def per_number(setting: Compression) -> float:
    """Bytes of a gradient's number under a setting."""
    return 6 * share_of(setting) if setting.entry.share is not None else setting.entry.gradient


def is_packed(plan: Plan, weight: Weight) -> bool:
    """Whether a weight's gradient is compressed."""
    setting = parse_compression(plan.compression)
    if setting.kind == "none" or setting.entry.adaptive or len(weight.shape) < 2 or math.prod(weight.shape) < LEAST:
        return False
    rows, columns = weight.shape[0], math.prod(weight.shape[1:])
    if setting.entry.low_rank and not pays_low_rank(rows, columns, int(setting.number)):
        return False
    return plan.tp == 1 or weight.cut is not None or weight.partial


def replica_bytes(plan: Plan, pieces: Iterable[Piece], ranks: int, at: float) -> Counter[str]:
    """What a rank hands over to sum the gradients of some whole weights over replicas, at an age of the run; adaptive
    sends them as they are until it knows better."""
    out: Counter[str] = Counter()
    wanted = parse_compression(plan.compression)
    setting = setting_at(wanted, at, ranks)
    for piece in pieces:
        if not is_packed(plan, piece.weight):
            out["all_reduce"] += 4 * (-(-piece.whole // ALIGN) * ALIGN)
        elif thin := _thin(plan, wanted, piece, at):
            out["all_reduce"] += thin
        else:
            _halves(out, _coded(setting), piece.whole, ranks)
    return out


def _thin(plan: Plan, wanted: Compression, piece: Piece, at: float) -> int:
    """Bytes of PowerSGD's two thin matrices; 0 where a weight does not travel as such."""
    if not wanted.entry.low_rank:
        return 0
    shape = piece.weight.on_tp(plan.tp, 0)
    rows, columns, rank = shape[0], math.prod(shape[1:]), int(wanted.number)
    return 4 * rank_at(rank, rows, columns, at) * (rows + columns) if thin_pays(rank, [(rows, columns)], at) else 0


def _coded(setting: Compression) -> Compression:
    return WARM if setting.entry.low_rank else setting


def _halves(out: Counter[str], setting: Compression, numbers: int, ranks: int) -> None:
    bytes_ = numbers * per_number(setting)
    if setting.entry.share is not None:
        out["all_gather"] += round(ranks * bytes_)
    else:
        out["all_to_all"] += round(bytes_)
        out["all_gather"] += round(bytes_)


def shard_bytes(
    plan: Plan, pieces: Iterable[Piece], ways: int, times: tuple[int, int], width: int, at: float
) -> tuple[Counter[str], Counter[str]]:
    """The same under shards: over the ranks that cut, and over their replicas. `times` is how often weights are
    gathered and gradients summed in a step, `width` the bytes of a weight that computes."""
    cut: Counter[str] = Counter()
    across: Counter[str] = Counter()
    wanted = parse_compression(plan.compression)
    here, there = setting_at(wanted, at), setting_at(wanted, at, plan.dp_replicate)
    gathers, scatters = times
    for piece in pieces:
        whole = piece.padded * ways
        if not is_packed(plan, piece.weight):
            cut["all_gather"] += gathers * whole * width
            cut["reduce_scatter"] += scatters * whole * 4
            across["all_reduce"] += piece.padded * 4
            continue
        cut["all_gather"] += round(gathers * whole * min(width, wanted.entry.weight))
        if thin := _thin(plan, wanted, piece, at):
            cut["all_reduce"] += scatters * thin
            across["all_reduce"] += scatters * thin
        else:
            cut["all_to_all"] += round(scatters * whole * per_number(_coded(here)))
            _halves(across, _coded(there), piece.padded, plan.dp_replicate)
    return cut, across if plan.dp_replicate > 1 else Counter()


def owed_of(plan: Plan, pieces: Iterable[Piece]) -> float:
    """Bytes that a rank keeps of what it owes: of each compressed weight as much as tp leaves of it."""
    owed = parse_compression(plan.compression).entry.residual
    return owed * sum(p.whole for p in pieces if is_packed(plan, p.weight)) if plan.dp * plan.cp > 1 else 0.0
