"""The codecs of `comm.compression`, by setting, and the dense ones: bf16, fp16 and signs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.compression.codec_base import (
    Agree,
    Codec,
    RoundingNoise,
    join_bytes,
    largest,
    read_numbers,
    to_blocks,
    write_to,
)
from weft.comm.compression.integer_codec import Integers
from weft.comm.compression.sparse_codec import Largest
from weft.job.compression import Compression, share_of
from weft.job.import_by_name import find_object
from weft.planner.engine_constants import NOISE_VALUES


def _power(sizes: Tensor) -> Tensor:
    """The power of two just above a value, so that division is exact; 1 for zero."""
    some = sizes > 1e-30
    return torch.where(some | ~torch.isfinite(sizes), torch.exp2(torch.ceil(torch.log2(sizes))), 1.0)


@dataclass(frozen=True)
class BFloat(Codec):
    """bfloat16: the upper half of an fp32 number, after noise was added to its lower half."""

    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor:
        if rounding is None:
            return join_bytes(x.bfloat16())
        flat = x.contiguous().view(torch.int32).view(-1)
        some = min(len(flat), NOISE_VALUES) if x.device.type == "cpu" else len(flat)
        noise = (rounding.noise(1, some)[0] * 65536).int()
        parts = [((part + noise[: len(part)]) >> 16).to(torch.int16) for part in flat.split(max(1, some))]
        return join_bytes(torch.cat(parts).view(x.shape))

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        near = payload.view(torch.bfloat16)
        return near.float() if out is None else out.copy_(near)

    def bytes_of(self, n: int) -> int:
        return 2 * n


@dataclass(frozen=True)
class Half(Codec):
    """fp16 of numbers that were scaled into its range by a power of two for each block."""

    block: int = 512

    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor:
        blocks = to_blocks(x, self.block)
        power = _power(largest(blocks))  # [rows, blocks]
        near = (blocks / power[..., None]).flatten(1)
        if rounding is not None:  # fp16 keeps 10 of the 23 fraction bits
            raised = near.view(torch.int32) + (rounding.noise(*near.shape) * 8192).int()
            near = (raised & -8192).view(torch.float32)
        return join_bytes(near.half(), power)

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        count = -(-n // self.block)
        values = read_numbers(payload, 0, count * self.block, torch.float16).float()
        power = read_numbers(payload, 2 * count * self.block, count, torch.float32)
        return write_to(out, (values.view(*power.shape, self.block) * power[..., None]).flatten(1)[:, :n])

    def bytes_of(self, n: int) -> int:
        return -(-n // self.block) * (2 * self.block + 4)


@dataclass(frozen=True)
class Signs(Codec):
    """One bit a number, and the mean size of each block (1-bit SGD, Seide et al. 2014)."""

    block: int = 512
    feedback = True

    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor:
        blocks = to_blocks(x, self.block)
        size = blocks.abs().div_(self.block).sum(-1)  # divided first, the sum cannot overflow
        size[:, -1] *= self.block / (self.block - -x.shape[1] % self.block)  # without the padding
        bits = (blocks >= 0).view(x.shape[0], -1, 8).to(torch.uint8)
        weight = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
        return join_bytes((bits * weight).sum(-1, dtype=torch.uint8), size)

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        count = -(-n // self.block)
        packed = payload[:, : count * self.block // 8]
        places = torch.arange(8, dtype=torch.uint8, device=payload.device)
        signs = ((packed[..., None] >> places) & 1).float().mul_(2).sub_(1)
        size = read_numbers(payload, count * self.block // 8, count, torch.float32)
        return write_to(out, (signs.view(*size.shape, self.block) * size[..., None]).flatten(1)[:, :n])

    def bytes_of(self, n: int) -> int:
        return -(-n // self.block) * (self.block // 8 + 4)


WEIGHTS = Integers(8, 128)
"""How gathered weights are sent where gradients are smaller still: rounded to nearest, without a residual."""


@dataclass(frozen=True)
class Codecs:
    """The codecs of gradients and of gathered weights under a setting."""

    gradients: Codec | None
    weights: Codec | None = WEIGHTS


def none(number: float) -> Codecs:
    return Codecs(None, None)


def fp16(number: float) -> Codecs:
    return Codecs(Half(), Half())


def bf16(number: float) -> Codecs:
    return Codecs(BFloat(), BFloat())


def int8(number: float) -> Codecs:
    return Codecs(Integers(8, 256))


def int4(number: float) -> Codecs:
    return Codecs(Integers(4, 128, feedback=True))


def topk(share: float) -> Codecs:
    return Codecs(Largest(share=share))


def threshold(times: float) -> Codecs:
    return Codecs(Largest(share_of(Compression("threshold", times)), times))


def powersgd(rank: float) -> Codecs:
    return Codecs(None)  # a matrix is sent as two thin ones, not by a codec


def onebit(number: float) -> Codecs:
    return Codecs(Signs())


def codecs_of(compression: Compression) -> Codecs:
    """The codecs of a setting; that of gradients is None for none and for powersgd, which is not a codec."""
    found: Codecs = find_object(compression.entry.build, "comm.compression")(compression.number)
    return found
