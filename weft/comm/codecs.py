"""What numbers travel as: each codec turns rows of fp32 into rows of bytes and back.

A codec is either unbiased, by stochastic rounding, so that errors cancel over ranks and steps; or it tells what it did
not send (`feedback`), and who uses it adds that to what is sent next. Sums are made of decoded fp32 numbers, so none
overflows. What is not finite arrives as something not finite, so that a loss scale learns of it on every rank.
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
"""Different values that the dice show."""

Agree = Callable[[list[int]], list[int]]
"""Of each number the largest that a rank has."""


class Dice:
    """Noise for stochastic rounding: a window, at a random place, of one table of evenly spread numbers.

    Every number is as likely as any other at every place, which is all that being unbiased needs, and a window costs a
    copy where random numbers cost a generator. `rolls` is the whole state.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.rolls = seed, 0
        order = torch.randperm(TABLE, generator=torch.Generator().manual_seed(0))
        self.table = ((order.float() + 0.5) / TABLE).repeat(2).to(device)

    def noise(self, rows: int, count: int) -> Tensor:
        """[rows, count] numbers between 0 and 1."""
        self.rolls += 1
        place = random.Random(f"{self.seed} {self.rolls}").randrange(TABLE)
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

    def encode(self, x: Tensor, dice: Dice | None, agree: Agree) -> Tensor: ...

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor: ...

    def bytes_of(self, n: int) -> int: ...


def _blocks(x: Tensor, block: int) -> Tensor:
    """[rows, n] → [rows, blocks, block], filled up with zeros."""
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
    return part.clone(memory_format=torch.contiguous_format).view(dtype)  # bytes may lie at odd places


def _put(values: Tensor, out: Tensor | None) -> Tensor:
    return values if out is None else out.copy_(values)


def _largest(blocks: Tensor) -> Tensor:
    """The largest size in each block: thirty times as fast on a CPU as torch's own norm of that kind."""
    return torch.maximum(blocks.amax(-1), -blocks.amin(-1))


def _power(largest: Tensor) -> Tensor:
    """The power of two just above a size, by which to divide without an error; 1 for a size of nothing."""
    some = largest > 1e-30
    return torch.where(some | ~torch.isfinite(largest), torch.exp2(torch.ceil(torch.log2(largest))), 1.0)


@dataclass(frozen=True)
class BFloat:
    """bfloat16: the upper half of an fp32 number, after its lower half was raised by chance."""

    feedback: bool = False
    sparse: bool = False

    def encode(self, x: Tensor, dice: Dice | None, agree: Agree) -> Tensor:
        if dice is None:
            return _joined(x.bfloat16())
        flat = x.contiguous().view(torch.int32).view(-1)
        some = min(len(flat), TABLE) if x.device.type == "cpu" else len(flat)
        noise = (dice.noise(1, some)[0] * 65536).int()
        parts = [((part + noise[: len(part)]) >> 16).to(torch.int16) for part in flat.split(max(1, some))]
        return _joined(torch.cat(parts).view(x.shape))

    def decode(self, payload: Tensor, n: int, out: Tensor | None = None) -> Tensor:
        near = payload.view(torch.bfloat16)
        return near.float() if out is None else out.copy_(near)

    def bytes_of(self, n: int) -> int:
        return 2 * n


@dataclass(frozen=True)
class Half:
    """fp16 of numbers that were brought into its range, block by block, by a power of two."""

    block: int = 512
    feedback: bool = False
    sparse: bool = False

    def encode(self, x: Tensor, dice: Dice | None, agree: Agree) -> Tensor:
        blocks = _blocks(x, self.block)
        power = _power(_largest(blocks))  # [rows, blocks]
        near = (blocks / power[..., None]).flatten(1)
        if dice is not None:  # fp16 keeps 10 of the 23 digits behind the point
            raised = near.view(torch.int32) + (dice.noise(*near.shape) * 8192).int()
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
    """Two bytes' lower halves as one byte: [rows, n] → [rows, n / 2]. As pairs, which a CPU takes many at a time."""
    pairs = whole.view(torch.int16)
    return ((pairs & 0x000F) | ((pairs & 0x0F00) >> 4)).to(torch.uint8)


def _from_nibbles(packed: Tensor) -> Tensor:
    """The numbers of four bits, with their signs: shifted up and down again each keeps its own."""
    pairs = packed.view(torch.uint8).to(torch.int16)
    whole = ((pairs & 0x000F) | ((pairs & 0x00F0) << 4)).view(torch.int8)
    return (whole << 4) >> 4


@dataclass(frozen=True)
class Integers:
    """Whole numbers of a few bits, with one scale a block; two to a byte where they have four bits."""

    bits: int
    block: int
    feedback: bool
    sparse: bool = False

    def encode(self, x: Tensor, dice: Dice | None, agree: Agree) -> Tensor:
        rows, n = x.shape
        payload = torch.empty(rows, self.bytes_of(n), dtype=torch.uint8, device=x.device)
        noise = self._noise(dice, rows, n, x.device)
        for first, last in self._cuts(rows, n, x.device):
            blocks = _blocks(x[:, first * self.block : last * self.block], self.block)
            self._write(payload, n, first, last, *self._rounded(blocks, noise))
        return payload

    def passed_on(self, came: Tensor, own: Tensor, dice: Dice | None, missing: Tensor | None) -> Tensor:
        """encode() of the sum of own, [n], and of what came, [rows, bytes], and in `missing` what that loses: piece by
        piece, for memory is what takes the time."""
        rows, n = len(came), own.numel()
        payload = torch.empty(1, self.bytes_of(n), dtype=torch.uint8, device=own.device)
        noise = self._noise(dice, rows, n, own.device)
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

    def _noise(self, dice: Dice | None, rows: int, n: int, device: torch.device) -> Tensor | None:
        if dice is None or not n:
            return None
        first, last = next(self._cuts(rows, n, device))
        return dice.noise(rows * (last - first), self.block)

    def _write(self, payload: Tensor, n: int, first: int, last: int, steps: Tensor, scale: Tensor) -> None:
        """Some blocks' numbers, [rows, blocks, block], and scales, [rows, blocks], to where they belong."""
        whole, scales = self._parts(payload, n)
        scales[:, first:last] = scale
        whole[:, first:last] = steps if self.bits == 8 else _nibbles(steps.to(torch.int8))

    def _read(self, payload: Tensor, n: int, first: int, last: int) -> Tensor:
        """Some blocks of what travelled, [rows, blocks, block]."""
        whole, scales = self._parts(payload, n)
        part = whole[:, first:last]
        near = (part if self.bits == 8 else _from_nibbles(part)).float()
        return near.mul_(scales[:, first:last, None])

    def _parts(self, payload: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Views of the whole numbers, [rows, blocks, bytes of a block], and of the scales, [rows, blocks]."""
        count, each = -(-n // self.block), self.block * self.bits // 8
        whole = payload[:, : count * each].view(torch.int8 if self.bits == 8 else torch.uint8)
        return whole.unflatten(1, (count, each)), payload[:, count * each :].view(torch.float32)

    def _cuts(self, rows: int, n: int, device: torch.device) -> Iterator[tuple[int, int]]:
        """The first and last blocks of what is done at a time: what stays in a CPU's cache; a GPU takes all at once."""
        count = -(-n // self.block)
        some = max(1, TABLE // self.block // rows) if device.type == "cpu" else max(1, count)
        return ((first, min(first + some, count)) for first in range(0, count, some))

    def _rounded(self, blocks: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Whole numbers, not yet of a type of their own, and the scales of some blocks, [rows, blocks, block]."""
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

    def encode(self, x: Tensor, dice: Dice | None, agree: Agree) -> Tensor:
        blocks = _blocks(x, self.block)
        size = blocks.abs().div_(self.block).sum(-1)  # divided first, the sum cannot overflow
        size[:, -1] *= self.block / (self.block - -x.shape[1] % self.block)  # what fills it up does not count
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


SKIP, SURELY = 64, 1.3
"""Of how many numbers one is looked at to guess a limit, and how many more than wanted shall lie above it."""


def _top(size: Tensor, k: int) -> Tensor:
    """Places of the k largest. Few of many are found among those above a guessed limit, which a CPU does in a fraction
    of the time; a GPU would have to wait for their count."""
    few = math.ceil(SURELY * k / SKIP) + 4
    if size.device.type == "cpu" and few < size.numel() // SKIP // 4 and not is_fake(size):
        limit = size[::SKIP].topk(few).values[-1]
        above = (size >= limit).nonzero().squeeze(1)
        if k <= above.numel() < size.numel() // 4:
            return above[size[above].topk(k, sorted=False).indices]
    return size.topk(k, sorted=False).indices


@dataclass(frozen=True)
class Largest:
    """The largest numbers with their places: a share of all, or those above a multiple of the root mean square.

    Each of `parts`, columns of so many numbers, has its own: gradients of one weight are smaller than those of another,
    and would never be sent. All ranks send as many as the one with the most, so that messages are of one size.
    """

    share: float = 0.0
    times: float = 0.0
    parts: tuple[int, ...] = ()
    feedback: bool = True
    sparse: bool = True

    def encode(self, x: Tensor, dice: Dice | None, agree: Agree) -> Tensor:
        columns = self.parts or (x.shape[1],)
        size = x.abs().split(columns, 1)
        counts = [self._count(n) for n in columns]
        if self.times and not is_fake(x):  # a dry run has no numbers to count
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
        """Places and values, [rows, k] each."""
        k = payload.shape[1] // 6
        return _taken(payload, 0, k, torch.int32).long(), _taken(payload, 4 * k, k, torch.bfloat16).float()

    def _count(self, n: int) -> int:
        return min(n, max(1, math.ceil(self.share * n)))

    def bytes_of(self, n: int) -> int:
        return 6 * sum(self._count(part) for part in self.parts or (n,))


def sum_of(codec: Codec, payload: Tensor, n: int) -> Tensor:
    """The sum of all rows' numbers, added up in the order of the rows."""
    if not isinstance(codec, Largest):
        rows = codec.decode(payload, n)
        return rows[0] if len(rows) == 1 else rows.sum(0)
    places, values = codec.read(payload)
    total = values.new_zeros(n)
    for row in range(payload.shape[0]):
        total.index_add_(0, places[row], values[row])
    return total


def passed_on(
    codec: Codec, payload: Tensor, own: Tensor, dice: Dice | None, agree: Agree, missing: Tensor | None
) -> Tensor:
    """Encoded, the sum of own, [n], and of what came, [rows, bytes]; `missing` [n] becomes what that leaves out."""
    if isinstance(codec, Integers):
        return codec.passed_on(payload, own, dice, missing)
    total = sum_of(codec, payload, own.numel()).add_(own)
    out = codec.encode(total[None], dice, agree)
    if missing is not None:
        torch.sub(total, codec.decode(out, own.numel())[0], out=missing)
    return out


WEIGHTS = Integers(8, 128, feedback=False)
"""What weights travel as where gradients are smaller still: they are rounded to the nearest, and nothing is owed."""


@dataclass(frozen=True)
class Way:
    """How gradients and gathered weights travel under a setting."""

    gradients: Codec | None
    weights: Codec | None = WEIGHTS


def none(number: float) -> Way:
    return Way(None, None)


def fp16(number: float) -> Way:
    return Way(Half(), Half())


def bf16(number: float) -> Way:
    return Way(BFloat(), BFloat())


def int8(number: float) -> Way:
    return Way(Integers(8, 256, feedback=False))


def int4(number: float) -> Way:
    return Way(Integers(4, 128, feedback=True))


def topk(share: float) -> Way:
    return Way(Largest(share=share))


def threshold(times: float) -> Way:
    return Way(Largest(share_of(Compression("threshold", times)), times))


def powersgd(rank: float) -> Way:
    return Way(None)  # a matrix is sent as two thin ones, not by a codec


def onebit(number: float) -> Way:
    return Way(Signs())


def way_of(compression: Compression) -> Way:
    """The codecs of a setting; that of gradients is None for none and for powersgd, which is not a codec."""
    found: Way = find_object(compression.entry.build, "comm.compression")(compression.number)
    return found
