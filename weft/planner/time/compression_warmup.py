"""Compression warm-up: how much is sent early in a run, before the wanted compression applies.

Strong compression (1 % of values, rank 4) delays most of a gradient by dozens of steps through error feedback. That
hurts early steps, in which gradients change quickly and Adam divides by their recent size. So gradients are sent as
int8 for a warm-up, and then less with the age of the run, counted in warm-ups: the share of values falls from 1/6 (as
many bytes as int8) as 1/age, the rank of PowerSGD from four times the wanted one by halves, and signs follow int4.
Nothing that needs more bytes than int8 replaces it before the wanted setting applies.
"""

from __future__ import annotations

import math
from itertools import pairwise

from weft.job.compression import Compression, share_of

SPARSE_SHARE_OF_INT8 = 1 / 6
"""The share of values that needs, with their indices, as many bytes as all of them in int8."""
RAMP_FACTOR = 4
"""Ratio of the rank (or bits) at the end of the warm-up to the wanted one."""

WARMUP_COMPRESSION = Compression("int8")


def age(step: float, warmup: int) -> float:
    """Age of a run at a step, in warm-ups."""
    return step / warmup if warmup else math.inf


def share_at(at: float) -> float:
    """The least share of values that is sent at an age."""
    return SPARSE_SHARE_OF_INT8 / at


def sparse_waits(at: float, gathering: int) -> bool:
    """Whether sparse lists gathered from this many ranks are more bytes than int8 reduce-scatter and all-gather."""
    return at < gathering / 2


def setting_at(wanted: Compression, at: float, gathering: int = 1) -> Compression:
    """The compression used at an age, where `wanted` applies in the end."""
    if not wanted.entry.ramped:
        return wanted
    lists = wanted.entry.share is not None
    if at < 1 or (lists and sparse_waits(at, gathering)):
        return WARMUP_COMPRESSION
    if lists and share_at(at) > share_of(wanted):
        return Compression("topk", share_at(at))
    through = wanted.entry.ramped_through
    return Compression(through) if through and at < RAMP_FACTOR else wanted


def pays_low_rank(rows: int, columns: int, rank: int) -> bool:
    """Whether two low-rank matrices have less than half of the whole one's elements."""
    return 2 * rank * (rows + columns) < rows * columns


def rank_at(rank: int, rows: int, columns: int, at: float) -> int:
    """The rank used at an age, limited to ranks that save bytes."""
    more = 1 if at >= RAMP_FACTOR else 2 if at >= RAMP_FACTOR / 2 else RAMP_FACTOR
    while more > 1 and not pays_low_rank(rows, columns, rank * more):
        more //= 2
    return rank * more


def thin_pays(rank: int, shapes: list[tuple[int, int]], at: float) -> bool:
    """Whether matrices of these shapes are sent as low-rank ones at an age: always after the ramp, before that only
    where that is fewer bytes than int8."""
    thin = sum(4 * rank_at(rank, rows, columns, at) * (rows + columns) for rows, columns in shapes)
    return at >= RAMP_FACTOR or (at >= 1 and thin < sum(rows * columns for rows, columns in shapes))


def age_ranges(wanted: Compression, steps: int, warmup: int, gathering: int) -> list[tuple[float, float]]:
    """A run divided into ranges of one setting: the share of steps of each, and an age at which as much is sent as on
    average in the range."""
    if not warmup or not steps or not wanted.entry.ramped:
        return [(1.0, math.inf)]
    end = steps / warmup
    turns = [1.0, RAMP_FACTOR / 2, float(RAMP_FACTOR), gathering / 2]
    if wanted.entry.share is not None:
        turns.append(SPARSE_SHARE_OF_INT8 / share_of(wanted))
    marks = [0.0, *sorted({t for t in turns if 0 < t < end}), end]
    return [((b - a) / end, (b - a) / math.log(b / a) if a else b / 2) for a, b in pairwise(marks)]
