"""Codecs and low-rank bases while compression is ramped up (planner/time/compression_warmup.py)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from weft.comm.compression.codec_base import Codec
from weft.comm.compression.codecs import Signs, codecs_of
from weft.comm.compression.sparse_codec import Largest
from weft.job.compression import Compression
from weft.planner.time.compression_warmup import RAMP_FACTOR, WARMUP_COMPRESSION, share_at, sparse_waits

INT8 = codecs_of(WARMUP_COMPRESSION).gradients
_MIDDLE = codecs_of(Compression("int4")).gradients


def codec_at(codec: Codec | None, at: float, gathering: int = 1) -> Codec | None:
    """The codec of gradients at an age of the run, given the final one. Lists of the largest, which `gathering` ranks
    gather from each other, are used once they are smaller than int8 sums."""
    if at < 1 or (isinstance(codec, Largest) and sparse_waits(at, gathering)):
        return INT8
    if isinstance(codec, Largest) and (share := share_at(at)) > codec.share:
        return replace(codec, share=share, times=0.0)
    return _MIDDLE if isinstance(codec, Signs) and at < RAMP_FACTOR else codec


def fit_basis(base: Tensor, first: Tensor) -> Tensor:
    """A base with as many columns as `first`: its own, and those of `first` where it has too few."""
    rank = first.shape[1]
    if base.shape[1] >= rank:
        return base[:, :rank]
    first = first.clone()
    first[:, : base.shape[1]] = base
    return first
