"""How much more is sent while a run is young: what is late by many steps must not begin before they are few.

The largest hundredth, or four directions of a matrix, leave the rest of a gradient owed for dozens of steps. That does
no harm to a run of thousands of steps behind it and much to a young one, in which gradients still turn and Adam divides
by their recent size. So gradients travel as int8 for a warm-up, and from then on what is sent falls with a run's age,
which is counted in warm-ups: the share of the largest from a sixth (as many bytes as int8) as 1/age, the rank of
matrices from four times the wanted one by halves, and signs begin after int4. Nothing that would be more bytes than
int8 takes its place before the wanted one does.
"""

from __future__ import annotations

import math
from itertools import pairwise

from weft.job.compression import Compression, share_of

AS_INT8 = 1 / 6
"""The share of numbers that, with their places, are as many bytes as all of them in int8."""
MORE = 4
"""How much is sent at the end of the warm-up, against what is wanted, where it falls by halves."""
WARM = Compression("int8")


def age(step: float, warmup: int) -> float:
    """How many warm-ups have gone by at the step of this number, from 0."""
    return step / warmup if warmup else math.inf


def share_at(at: float) -> float:
    """The share of the largest numbers that an age asks for at the least."""
    return AS_INT8 / at


def lists_wait(at: float, gathering: int) -> bool:
    """Whether lists of the largest, which so many ranks gather from each other, are more than int8 in two halves."""
    return at < gathering / 2


def setting_at(wanted: Compression, at: float, gathering: int = 1) -> Compression:
    """What gradients travel as at an age, instead of what is wanted in the end."""
    if not wanted.entry.ramped:
        return wanted
    lists = wanted.entry.share is not None
    if at < 1 or (lists and lists_wait(at, gathering)):
        return WARM
    if lists and share_at(at) > share_of(wanted):
        return Compression("topk", share_at(at))
    through = wanted.entry.ramped_through
    return Compression(through) if through and at < MORE else wanted


def pays_low_rank(rows: int, columns: int, rank: int) -> bool:
    """Whether two thin matrices are less than half of the whole one."""
    return 2 * rank * (rows + columns) < rows * columns


def rank_at(rank: int, rows: int, columns: int, at: float) -> int:
    """The rank of a matrix's two thin ones at an age: never one that does not pay."""
    more = 1 if at >= MORE else 2 if at >= MORE / 2 else MORE
    while more > 1 and not pays_low_rank(rows, columns, rank * more):
        more //= 2
    return rank * more


def thin_pays(rank: int, shapes: list[tuple[int, int]], at: float) -> bool:
    """Whether matrices, of so many rows and columns, travel as thin ones at an age: always in the end, and before that
    where they are fewer bytes than int8."""
    thin = sum(4 * rank_at(rank, rows, columns, at) * (rows + columns) for rows, columns in shapes)
    return at >= MORE or (at >= 1 and thin < sum(rows * columns for rows, columns in shapes))


def ages(wanted: Compression, steps: int, warmup: int, gathering: int) -> list[tuple[float, float]]:
    """A run in stretches in which what is sent does not change, or falls as 1/age: for each its share of the steps and
    an age at which as much is sent as in its mean."""
    if not warmup or not steps or not wanted.entry.ramped:
        return [(1.0, math.inf)]
    end = steps / warmup
    turns = [1.0, MORE / 2, float(MORE), gathering / 2]
    if wanted.entry.share is not None:
        turns.append(AS_INT8 / share_of(wanted))
    marks = [0.0, *sorted({t for t in turns if 0 < t < end}), end]
    return [((b - a) / end, (b - a) / math.log(b / a) if a else b / 2) for a, b in pairwise(marks)]
