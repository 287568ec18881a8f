"""What gradients and tensors are sent as."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.comm.compression.codec_base import RoundingNoise
from weft.comm.compression.codecs import codecs_of
from weft.comm.compression.compressed_sum import sum_all
from weft.job.compression import parse_compression
from weft.job.errors import JobError
from weft.mesh import Mesh


class TensorCompressor:
    """Changes a tensor before it is sent, and the result back. Subclasses may come from a script."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What is sent, and what decompress() needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        raise NotImplementedError


class NoneCompressor(TensorCompressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(TensorCompressor):
    """Sends floating-point tensors in 16 bits."""

    dtype = torch.float16

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Sends floating-point tensors as bfloat16."""

    dtype = torch.bfloat16


class HvdCompression:
    """Compressors; a setting of comm.compression such as "int8" may be given too."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = "int8"


AnyCompression = type[TensorCompressor] | TensorCompressor | str
BY_NAME: dict[str, type[TensorCompressor]] = {"none": NoneCompressor, "fp16": FP16Compressor, "bf16": BF16Compressor}


def compressor_named(compression: AnyCompression | None) -> type[TensorCompressor] | TensorCompressor | None:
    """The compressor; None for a codec of comm.compression."""
    if compression is None or isinstance(compression, str):
        return BY_NAME.get(compression or "none")
    return compression


def codec_setting(compression: str) -> str:
    """A setting of comm.compression, checked."""
    try:
        return str(parse_compression(compression))
    except ValueError as error:
        raise JobError(f"compression={compression!r} {error}") from None


def coded_sum(tensor: Tensor, compression: str, mesh: Mesh) -> Tensor:
    """The sum over all ranks, sent by a codec of comm.compression."""
    codec, axis = codecs_of(parse_compression(codec_setting(compression))).gradients, mesh.everyone
    setting = parse_compression(compression)
    if codec is None or setting.entry.share is not None or setting.entry.low_rank:
        raise JobError(
            f"compression={compression} needs DistributedOptimizer; here fp16, bf16, int8 or int4 would work"
        )
    if axis is None:
        return tensor.detach().clone()
    total, _ = sum_all(axis, codec, tensor.detach().float().flatten().clone(), RoundingNoise(mesh.rank, mesh.device))
    return total.view(tensor.shape).to(tensor.dtype)
