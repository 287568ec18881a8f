"""What gradients travel as at an age of the run (planner/time/compression_warmup.py), in codecs and bases."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from weft.comm.codecs import Codec, Largest, Signs, way_of
from weft.job.compression import Compression
from weft.planner.time.compression_warmup import (
    RAMP_FACTOR,
    WARMUP_COMPRESSION,
    share_at,
    sparse_waits,
)

INT8 = way_of(WARMUP_COMPRESSION).gradients
_MIDDLE = way_of(Compression("int4")).gradients


def codec_at(codec: Codec | None, at: float, gathering: int = 1) -> Codec | None:
    """What gradients travel as at an age, instead of a codec that is wanted in the end. Lists of the largest, which so
    many ranks gather from each other, wait until they are less than int8 in two halves."""
    if at < 1 or (isinstance(codec, Largest) and sparse_waits(at, gathering)):
        return INT8
    if isinstance(codec, Largest) and (share := share_at(at)) > codec.share:
        return replace(codec, share=share, times=0.0)
    return _MIDDLE if isinstance(codec, Signs) and at < RAMP_FACTOR else codec


def fitted(base: Tensor, first: Tensor) -> Tensor:
    """A base of as many columns as another has: some of its own, and the other's where it has too few."""
    rank = first.shape[1]
    if base.shape[1] >= rank:
        return base[:, :rank]
    first = first.clone()
    first[:, : base.shape[1]] = base
    return first
