"""A compressor of a user's own: gradients as 8-bit floating-point numbers."""

import torch
from torch import Tensor

from weft.comm.compression.codec_base import Agree, Codec, RoundingNoise
from weft.comm.compression.codecs import Codecs
from weft.job.compression import COMPRESSORS, CompressionKind


class Float8(Codec):
    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 448
        return torch.cat([scale.view(torch.uint8), (x / scale).to(torch.float8_e4m3fn).view(torch.uint8)], 1)

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        scale = payload[:, :4].contiguous().view(torch.float32)
        values = payload[:, 4:].contiguous().view(torch.float8_e4m3fn).float() * scale
        return values if out is None else out.copy_(values)

    def bytes_of(self, n: int) -> int:
        return n + 4


def build(number: float) -> Codecs:
    return Codecs(Float8())


COMPRESSORS.register(CompressionKind("float8", "E4M3.", f"{__name__}:build", gradient=1.0, weight=1.03, encoding=24.0))
