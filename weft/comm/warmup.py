"""How much more is sent while a run is young: what is late by many steps must not begin before they are few.

The largest hundredth, or four directions of a matrix, leave the rest of a gradient owed for dozens of steps. That does
no harm to a run of thousands of steps behind it and much to a young one, in which gradients still turn and Adam divides
by their recent size. So gradients travel as int8 for a warm-up, and from then on what is sent falls with a run's age,
which is counted in warm-ups: the share of the largest from a sixth (as many bytes as int8) as 1/age, the rank of
matrices from four times the wanted one by halves, and signs begin after int4.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from weft.comm.codecs import Codec, Largest, Signs, way_of
from weft.comm.compress import pays_low_rank
from weft.job.compression import Compression

AS_INT8 = 1 / 6
"""The share of numbers that, with their places, are as many bytes as all of them in int8."""
MORE = 4
"""How much is sent at the end of the warm-up, against what is wanted, where it falls by halves."""

WARM = way_of(Compression("int8")).gradients
_MIDDLE = way_of(Compression("int4")).gradients


def age(step: int, warmup: int) -> float:
    """How many warm-ups have gone by at the step of this number, from 0."""
    return step / warmup if warmup else math.inf


def codec_at(codec: Codec | None, at: float, gathering: int = 1) -> Codec | None:
    """What gradients travel as at an age, instead of a codec that is wanted in the end. Lists of the largest, which so
    many ranks gather from each other, wait until they are less than int8 in two halves."""
    if at < 1 or (isinstance(codec, Largest) and at < gathering / 2):
        return WARM
    if isinstance(codec, Largest) and (share := AS_INT8 / at) > codec.share:
        return replace(codec, share=share, times=0.0)
    return _MIDDLE if isinstance(codec, Signs) and at < MORE else codec


def rank_at(rank: int, rows: int, columns: int, at: float) -> int:
    """The rank of a matrix's two thin ones at an age: never one that does not pay."""
    more = 1 if at >= MORE else 2 if at >= MORE / 2 else MORE
    while more > 1 and not pays_low_rank(rows, columns, rank * more):
        more //= 2
    return rank * more


def fitted(base: Tensor, first: Tensor) -> Tensor:
    """A base of as many columns as another has: some of its own, and the other's where it has too few."""
    rank = first.shape[1]
    if base.shape[1] >= rank:
        return base[:, :rank]
    first = first.clone()
    first[:, : base.shape[1]] = base
    return first
