"""Codecs: each turns rows of fp32 into rows of bytes and back.

A codec is either unbiased, by stochastic rounding, so that errors cancel over ranks and steps, or has error feedback
(`feedback`): what it did not send is added to the next message. Decoded fp32 numbers are summed, so no sum overflows.
Values that are not finite stay so, so that the loss scale sees them on every rank.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from weft.comm.fake_internals import is_fake
from weft.job.compression import Compression, share_of
from weft.job.registry import find_object

TABLE = 2**17
"""Different values of the noise."""

Agree = Callable[[list[int]], list[int]]
"""Returns the largest of the ranks' numbers, for each number."""


class RoundingNoise:
    """Noise for stochastic rounding: a window, at a random position, of a table of uniformly spread numbers.

    Every number is equally likely at every position, which is all that unbiased rounding needs; a window costs a copy
    instead of a random generator. `draws` is the whole state.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.draws = seed, 0
        order = torch.randperm(TABLE, generator=torch.Generator().manual_seed(0))
        self.table = ((order.float() + 0.5) / TABLE).repeat(2).to(device)

    def noise(self, rows: int, count: int) -> Tensor:
        """[rows, count] numbers between 0 and 1."""
        self.draws += 1
        place = random.Random(f"{self.seed} {self.draws}").randrange(TABLE)
        window, wanted = self.table[place : place + TABLE], rows * count
        if wanted > TABLE:
            window = window.repeat(-(-wanted // TABLE))
        return window[:wanted].view(rows, count)


class Codec(Protocol):
    """Rows of fp32 to rows of bytes, [rows, n] → [rows, bytes], and back, into `out` where that is given."""

    @property
    def feedback(self) -> bool: ...

    @property
    def sparse(self) -> bool: ...

    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor: ...

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor: ...

    def bytes_of(self, n: int) -> int: ...


def _blocks(x: Tensor, block: int) -> Tensor:
    """[rows, n] → [rows, blocks, block], padded with zeros."""
    rows, n = x.shape
    if n % block:
        x = functional.pad(x, (0, -n % block))
    return x.view(rows, -1, block)


def _joined(*parts: Tensor) -> Tensor:
    """Parts of any dtype, [rows, …] each, as one row of bytes a row."""
    return torch.cat([p.contiguous().view(torch.uint8).flatten(1) for p in parts], 1)


def _taken(payload: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers of a dtype that begin at a byte of each row."""
    part = payload[:, start : start + count * dtype.itemsize]
    return part.clone(memory_format=torch.contiguous_format).view(dtype)  # bytes may be unaligned


def _put(values: Tensor, out: Tensor | None) -> Tensor:
    return values if out is None else out.copy_(values)


def _largest(blocks: Tensor) -> Tensor:
    """The largest absolute value in each block: thirty times as fast on a CPU as torch's infinity norm."""
    return torch.maximum(blocks.amax(-1), -blocks.amin(-1))


def _power(largest: Tensor) -> Tensor:
    """The power of two just above a value, so that division is exact; 1 for zero."""
    some = largest > 1e-30
    return torch.where(some | ~torch.isfinite(largest), torch.exp2(torch.ceil(torch.log2(largest))), 1.0)


@dataclass(frozen=True)
class BFloat:
    """bfloat16: the upper half of an fp32 number, after noise was added to its lower half."""

    feedback: bool = False
    sparse: bool = False

    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor:
        if rounding is None:
            return _joined(x.bfloat16())
        flat = x.contiguous().view(torch.int32).view(-1)
        some = min(len(flat), TABLE) if x.device.type == "cpu" else len(flat)
        noise = (rounding.noise(1, some)[0] * 65536).int()
        parts = [((part + noise[: len(part)]) >> 16).to(torch.int16) for part in flat.split(max(1, some))]
        return _joined(torch.cat(parts).view(x.shape))

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        near = payload.view(torch.bfloat16)
        return near.float() if out is None else out.copy_(near)

    def bytes_of(self, n: int) -> int:
        return 2 * n


@dataclass(frozen=True)
class Half:
    """fp16 of numbers that were scaled into its range by a power of two for each block."""

    block: int = 512
    feedback: bool = False
    sparse: bool = False

    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor:
        blocks = _blocks(x, self.block)
        power = _power(_largest(blocks))  # [rows, blocks]
        near = (blocks / power[..., None]).flatten(1)
        if rounding is not None:  # fp16 keeps 10 of the 23 fraction bits
            raised = near.view(torch.int32) + (rounding.noise(*near.shape) * 8192).int()
            near = (raised & -8192).view(torch.float32)
        return _joined(near.half(), power)

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        count = -(-n // self.block)
        values = _taken(payload, 0, count * self.block, torch.float16).float()
        power = _taken(payload, 2 * count * self.block, count, torch.float32)
        return _put((values.view(*power.shape, self.block) * power[..., None]).flatten(1)[:, :n], out)

    def bytes_of(self, n: int) -> int:
        return -(-n // self.block) * (2 * self.block + 4)


def _nibbles(whole: Tensor) -> Tensor:
    """Two bytes' lower halves as one byte, [rows, n] → [rows, n / 2], in pairs, which CPUs vectorise."""
    pairs = whole.view(torch.int16)
    return ((pairs & 0x000F) | ((pairs & 0x0F00) >> 4)).to(torch.uint8)


def _from_nibbles(packed: Tensor) -> Tensor:
    """The four-bit numbers with their signs: an arithmetic shift up and down extends the sign."""
    pairs = packed.view(torch.uint8).to(torch.int16)
    whole = ((pairs & 0x000F) | ((pairs & 0x00F0) << 4)).view(torch.int8)
    return (whole << 4) >> 4


@dataclass(frozen=True)
class Integers:
    """Integers of 8 or 4 bits with one scale for each block; two to a byte with 4 bits."""

    bits: int
    block: int
    feedback: bool
    sparse: bool = False

    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor:
        rows, n = x.shape
        payload = torch.empty(rows, self.bytes_of(n), dtype=torch.uint8, device=x.device)
        noise = self._noise(rounding, rows, n, x.device)
        for first, last in self._cuts(rows, n, x.device):
            blocks = _blocks(x[:, first * self.block : last * self.block], self.block)
            self._write(payload, n, first, last, *self._rounded(blocks, noise))
        return payload

    def encode_sum(self, came: Tensor, own: Tensor, rounding: RoundingNoise | None, missing: Tensor | None) -> Tensor:
        """encode() of the sum of own, [n], and of received rows, [rows, bytes]; `missing` becomes what that loses. In
        parts that fit the cache, since memory traffic takes the time."""
        rows, n = len(came), own.numel()
        payload = torch.empty(1, self.bytes_of(n), dtype=torch.uint8, device=own.device)
        noise = self._noise(rounding, rows, n, own.device)
        for first, last in self._cuts(rows, n, own.device):
            near = self._read(came, n, first, last)
            total = near if rows == 1 else near.sum(0, keepdim=True)
            total += _blocks(own[None, first * self.block : last * self.block], self.block)
            steps, scale = self._rounded(total, noise)
            self._write(payload, n, first, last, steps, scale)
            if missing is not None:
                place = missing[first * self.block : last * self.block]
                place.copy_(torch.addcmul(total, steps, scale[..., None], value=-1).view(-1)[: len(place)])
        return payload

    def _noise(self, rounding: RoundingNoise | None, rows: int, n: int, device: torch.device) -> Tensor | None:
        if rounding is None or not n:
            return None
        first, last = next(self._cuts(rows, n, device))
        return rounding.noise(rows * (last - first), self.block)

    def _write(self, payload: Tensor, n: int, first: int, last: int, steps: Tensor, scale: Tensor) -> None:
        """Write the numbers, [rows, blocks, block], and scales, [rows, blocks], of some blocks."""
        whole, scales = self._parts(payload, n)
        scales[:, first:last] = scale
        whole[:, first:last] = steps if self.bits == 8 else _nibbles(steps.to(torch.int8))

    def _read(self, payload: Tensor, n: int, first: int, last: int) -> Tensor:
        """Decode some blocks, [rows, blocks, block]."""
        whole, scales = self._parts(payload, n)
        part = whole[:, first:last]
        near = (part if self.bits == 8 else _from_nibbles(part)).float()
        return near.mul_(scales[:, first:last, None])

    def _parts(self, payload: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Views of the integers, [rows, blocks, bytes of a block], and of the scales, [rows, blocks]."""
        count, each = -(-n // self.block), self.block * self.bits // 8
        whole = payload[:, : count * each].view(torch.int8 if self.bits == 8 else torch.uint8)
        return whole.unflatten(1, (count, each)), payload[:, count * each :].view(torch.float32)

    def _cuts(self, rows: int, n: int, device: torch.device) -> Iterator[tuple[int, int]]:
        """The first and last blocks of each part: on a CPU what fits its cache, on a GPU everything."""
        count = -(-n // self.block)
        some = max(1, TABLE // self.block // rows) if device.type == "cpu" else max(1, count)
        return ((first, min(first + some, count)) for first in range(0, count, some))

    def _rounded(self, blocks: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Integers, still as floats, and scales of some blocks, [rows, blocks, block]."""
        top = 2 ** (self.bits - 1) - 1
        largest = _largest(blocks)
        scale = torch.where(largest < 1e-30, 0.0, largest) / top
        inverse = torch.where(scale == 0, 0.0, 1 / scale)[..., None]
        if noise is None:
            steps = blocks * inverse + 0.5
        else:
            steps = torch.addcmul(noise[: blocks.shape[:2].numel()].view(blocks.shape), blocks, inverse)
        return steps.floor_().clamp_(-top, top), scale

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        rows = len(payload)
        out = torch.empty(rows, n, device=payload.device) if out is None else out
        for first, last in self._cuts(rows, n, payload.device):
            place = out[:, first * self.block : last * self.block]
            place.copy_(self._read(payload, n, first, last).flatten(1)[:, : place.shape[1]])
        return out

    def bytes_of(self, n: int) -> int:
        return -(-n // self.block) * (self.block * self.bits // 8 + 4)


@dataclass(frozen=True)
class Signs:
    """One bit a number, and the mean size of each block (1-bit SGD, Seide et al. 2014)."""

    block: int = 512
    feedback: bool = True
    sparse: bool = False

    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor:
        blocks = _blocks(x, self.block)
        size = blocks.abs().div_(self.block).sum(-1)  # divided first, the sum cannot overflow
        size[:, -1] *= self.block / (self.block - -x.shape[1] % self.block)  # without the padding
        bits = (blocks >= 0).view(x.shape[0], -1, 8).to(torch.uint8)
        weight = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
        return _joined((bits * weight).sum(-1, dtype=torch.uint8), size)

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        count = -(-n // self.block)
        packed = payload[:, : count * self.block // 8]
        places = torch.arange(8, dtype=torch.uint8, device=payload.device)
        signs = ((packed[..., None] >> places) & 1).float().mul_(2).sub_(1)
        size = _taken(payload, count * self.block // 8, count, torch.float32)
        return _put((signs.view(*size.shape, self.block) * size[..., None]).flatten(1)[:, :n], out)

    def bytes_of(self, n: int) -> int:
        return -(-n // self.block) * (self.block // 8 + 4)


SAMPLE_STRIDE, OVERSAMPLING = 64, 1.3
"""One number in how many is sampled to estimate a limit, and how many times the wanted count should exceed it."""


def _top(size: Tensor, k: int) -> Tensor:
    """Indices of the k largest. On a CPU they are searched among those above an estimated limit, in a fraction of the
    time; a GPU would have to synchronise for their count."""
    few = math.ceil(OVERSAMPLING * k / SAMPLE_STRIDE) + 4
    if size.device.type == "cpu" and few < size.numel() // SAMPLE_STRIDE // 4 and not is_fake(size):
        limit = size[::SAMPLE_STRIDE].topk(few).values[-1]
        above = (size >= limit).nonzero().squeeze(1)
        if k <= above.numel() < size.numel() // 4:
            return above[size[above].topk(k, sorted=False).indices]
    return size.topk(k, sorted=False).indices


@dataclass(frozen=True)
class Largest:
    """The largest numbers with their indices: a share of all, or those above a multiple of the root mean square.

    They are chosen within each of `parts`, columns of so many numbers: some weights have smaller gradients than others,
    which would never be sent. All ranks send as many as the one with the most, so that messages have one size.
    """

    share: float = 0.0
    times: float = 0.0
    parts: tuple[int, ...] = ()
    feedback: bool = True
    sparse: bool = True

    def encode(self, x: Tensor, rounding: RoundingNoise | None, agree: Agree) -> Tensor:
        columns = self.parts or (x.shape[1],)
        size = x.abs().split(columns, 1)
        counts = [self._count(n) for n in columns]
        if self.times and not is_fake(x):  # a dry run has no values
            counts = agree([self._above(part) for part in size])
        starts = accumulate(columns, initial=0)
        places = [
            torch.stack([_top(row, k) for row in part]) + start
            for part, k, start in zip(size, counts, starts, strict=False)
        ]
        chosen = torch.cat(places, 1)
        return _joined(chosen.int(), x.gather(1, chosen).bfloat16())

    def _above(self, size: Tensor) -> int:
        limit = self.times * size.square().mean(1, keepdim=True).sqrt()
        return max(1, int(((size >= limit) & (limit > 0)).sum(1).max()))

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        places, values = self.read(payload)
        return _put(values.new_zeros(payload.shape[0], n).scatter_(1, places, values), out)

    def read(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Indices and values, [rows, k] each."""
        k = payload.shape[1] // 6
        return _taken(payload, 0, k, torch.int32).long(), _taken(payload, 4 * k, k, torch.bfloat16).float()

    def _count(self, n: int) -> int:
        return min(n, max(1, math.ceil(self.share * n)))

    def bytes_of(self, n: int) -> int:
        return 6 * sum(self._count(part) for part in self.parts or (n,))


def sum_of(codec: Codec, payload: Tensor, n: int) -> Tensor:
    """The sum of the decoded rows, in row order."""
    if not isinstance(codec, Largest):
        rows = codec.decode(payload, n)
        return rows[0] if len(rows) == 1 else rows.sum(0)
    places, values = codec.read(payload)
    total = values.new_zeros(n)
    for row in range(payload.shape[0]):
        total.index_add_(0, places[row], values[row])
    return total


def encode_sum(
    codec: Codec, payload: Tensor, own: Tensor, rounding: RoundingNoise | None, agree: Agree, missing: Tensor | None
) -> Tensor:
    """The encoded sum of own, [n], and of received rows, [rows, bytes]; `missing`, [n], becomes what that loses."""
    if isinstance(codec, Integers):
        return codec.encode_sum(payload, own, rounding, missing)
    total = sum_of(codec, payload, own.numel()).add_(own)
    out = codec.encode(total[None], rounding, agree)
    if missing is not None:
        torch.sub(total, codec.decode(out, own.numel())[0], out=missing)
    return out


WEIGHTS = Integers(8, 128, feedback=False)
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
    return Codecs(Integers(8, 256, feedback=False))


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
