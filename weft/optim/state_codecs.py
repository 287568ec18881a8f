"""States in fewer bytes (memory.states): moments in bf16 or 8 bits, low halves of master weights in 8 bits.

An update works on fp32 values that are decoded before it and encoded behind it, piece by piece. Values are rounded up
or down at random, in proportion to their distance, so that small changes are not lost. The random numbers depend on
(seed, step, parameter, element) alone: every layout, and a run that was resumed, rounds the same way. Loaded values are
rounded to the nearest, which keeps those that were decoded from the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from weft.comm.shards import shard_of
from weft.memory.split_master import HALF
from weft.models.dropout import mix
from weft.planner.engine_constants import CODED_ELEMENTS, MIN_CODED_COLUMNS, STATE_SCALE_BLOCK

LEVELS = {"signed": 127, "unsigned": 255}
POWERS = {"signed": 2, "unsigned": 4}
"""An 8-bit code c is the value (c / levels) ** power of the block's largest: small values have more codes."""
UNSIGNED = frozenset({"exp_avg_sq"})
"""States that are never negative, and whose small values are divisors."""
RANDOM_BITS = 24
GAMMA = 0x1E3779B97F4A7C15
"""Odd factor that spreads the numbers of elements (Steele et al. 2014)."""


@dataclass(frozen=True)
class Rounding:
    """Random numbers of 24 bits for the elements of a shard of a weight, in one step."""

    key: int
    rows: Tensor
    """The number of each row of the shard (numbers_of_rows)."""
    first_column: int
    columns: int
    """Of the whole weight."""

    def draw(self, first: int, end: int, width: int) -> Tensor:
        """The numbers of the rows from `first` up to `end`."""
        columns = torch.arange(self.first_column, self.first_column + width, device=self.rows.device)
        index = self.rows[first:end, None] * self.columns + columns
        return (mix(index * GAMMA + self.key) >> (64 - RANDOM_BITS)) & ((1 << RANDOM_BITS) - 1)

    @property
    def keys(self) -> tuple[Tensor, int, int, int, int]:
        """What a kernel makes the same numbers from (codec_kernels.py)."""
        return self.rows, self.key, self.first_column, self.columns, GAMMA


@dataclass(frozen=True)
class CodedState:
    """What is stored of a state, for a kernel that decodes it and encodes the new values."""

    stored: Tensor
    rounding: Rounding


def _keys(rounding: Rounding | None) -> tuple[Tensor, int, int, int, int] | None:
    return None if rounding is None else rounding.keys


def numbers_of_rows(weight: Tensor, first_row: int, rows: int) -> Tensor:
    """The numbers in the whole weight of some rows of this rank's shard, all dims but the last counted as rows."""
    shard = shard_of(weight)
    index = torch.zeros((), dtype=torch.int64, device=weight.device)
    for dim, (offset, size) in enumerate(zip(shard.offset[:-1], shard.size[:-1], strict=True)):
        begin, count = (offset + first_row, rows) if dim == 0 else (offset, size)
        places = torch.arange(begin, begin + count, device=weight.device)
        index = index[..., None] * shard.shape[dim] + places
    return index.reshape(-1)


def rounding_of(seed: int, step: int, name: str, kind: str, weight: Tensor, numbers: Tensor) -> Rounding:
    """The random numbers for the rows of a state of a weight with these numbers."""
    digest = blake2b(f"{seed}/{step}/{name}/{kind}".encode(), digest_size=8).digest()
    shard = shard_of(weight)
    return Rounding(int.from_bytes(digest, "little", signed=True), numbers, shard.offset[-1], shard.shape[-1])


@dataclass(frozen=True)
class StateCodec:
    """How a state of at least two dims is stored. `rounding` is None to round to the nearest. A codec with kernels
    uses them on CUDA, with the same bits as its functions on a CPU."""

    dtype: torch.dtype
    stored_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    encode_rows: Callable[[Tensor, Tensor, Tensor | None], None]
    """Encode values [rows, columns] into stored rows with random numbers of the same shape."""
    decode_rows: Callable[[Tensor, Tensor], None]
    """Decode stored rows into values [rows, columns]."""
    values: torch.dtype = torch.float32
    encode_kernel: Callable[[Tensor, Tensor, Rounding | None], None] | None = None
    decode_kernel: Callable[[Tensor, Tensor], None] | None = None

    def decode(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The values of a stored state."""
        out = torch.empty(shape, dtype=self.values, device=stored.device)
        flat, rows = out.view(-1, shape[-1]), stored.reshape(-1, stored.shape[-1])
        if stored.is_cuda and self.decode_kernel is not None:
            self.decode_kernel(rows, flat)
            return out
        for first, end in _chunks(flat):
            self.decode_rows(rows[first:end], flat[first:end])
        return out

    def encode(self, values: Tensor, stored: Tensor, rounding: Rounding | None) -> None:
        """Store values."""
        flat, rows = values.reshape(-1, values.shape[-1]), stored.view(-1, stored.shape[-1])
        if values.is_cuda and self.encode_kernel is not None:
            self.encode_kernel(flat.contiguous(), rows, rounding)
            return
        for first, end in _chunks(flat):
            random = None if rounding is None else rounding.draw(first, end, flat.shape[1])
            self.encode_rows(flat[first:end], rows[first:end], random)


def _chunks(flat: Tensor) -> list[tuple[int, int]]:
    step = max(1, CODED_ELEMENTS // max(1, flat.shape[1]))
    return [(first, min(first + step, len(flat))) for first in range(0, len(flat), step)]


def _to_bf16(values: Tensor, stored: Tensor, random: Tensor | None) -> None:
    bits = values.contiguous().view(torch.int32)
    added = HALF if random is None else (random & 0xFFFF).to(torch.int32)
    stored.copy_(((bits + added) >> 16).to(torch.int16).view(torch.bfloat16))


def _from_bf16(stored: Tensor, values: Tensor) -> None:
    values.copy_(stored)


def _to_byte(values: Tensor, stored: Tensor, rounding: object) -> None:
    stored.copy_(values >> 8)


def _from_byte(stored: Tensor, values: Tensor) -> None:
    values.copy_(stored).bitwise_left_shift_(8)


def _blocks(columns: int) -> int:
    return -(-columns // STATE_SCALE_BLOCK)


def _largest(values: Tensor) -> Tensor:
    """The largest magnitude of each block of a row."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values.abs(), (0, _blocks(columns) * STATE_SCALE_BLOCK - columns))
    return padded.view(rows, -1, STATE_SCALE_BLOCK).amax(2)


def _spread(scales: Tensor, columns: int) -> Tensor:
    """The scale of each element."""
    return scales.repeat_interleave(STATE_SCALE_BLOCK, 1)[:, :columns]


def _eight_bits(kind: str) -> StateCodec:
    levels, power = LEVELS[kind], POWERS[kind]

    def level(code: Tensor) -> Tensor:
        share = (code / levels).square()
        return share if power == 2 else share.square()

    def encode(values: Tensor, stored: Tensor, random: Tensor | None) -> None:
        columns = values.shape[1]
        scales = _largest(values)
        share = (values.abs() / _spread(scales, columns)).nan_to_num_(0.0)
        root = share.sqrt() if power == 2 else share.sqrt().sqrt()
        code = (root * levels).floor_().clamp_(max=levels - 1)
        lower = level(code)
        up = (share - lower) / (level(code + 1) - lower)
        code += up > (0.5 if random is None else random.float() / (1 << RANDOM_BITS))
        if kind == "unsigned":  # a second moment of 0 would divide by 0
            code.clamp_(min=1.0).mul_(share > 0)
            stored[:, :columns].copy_(code)
        else:
            stored[:, :columns].copy_((code * values.sign()).to(torch.int8).view(torch.uint8))
        stored[:, columns:].copy_(scales.contiguous().view(torch.uint8))

    def decode(stored: Tensor, values: Tensor) -> None:
        columns = values.shape[1]
        code = stored[:, :columns]
        code = (code.contiguous().view(torch.int8) if kind == "signed" else code).float()
        scales = stored[:, columns:].contiguous().view(torch.float32)
        torch.mul(level(code), _spread(scales, columns), out=values)
        if kind == "signed":
            values.mul_(code.sign())

    def encode_kernel(values: Tensor, stored: Tensor, rounding: Rounding | None) -> None:
        from weft.optim.codec_kernels import encode_8bit

        encode_8bit(values, stored, levels, power, _keys(rounding))

    def decode_kernel(stored: Tensor, values: Tensor) -> None:
        from weft.optim.codec_kernels import decode_8bit

        decode_8bit(stored, values, levels, power)

    return StateCodec(
        torch.uint8, lambda shape: (*shape[:-1], shape[-1] + 4 * _blocks(shape[-1])), encode, decode,
        encode_kernel=encode_kernel, decode_kernel=decode_kernel,
    )  # fmt: skip


def _bf16_kernel(values: Tensor, stored: Tensor, rounding: Rounding | None) -> None:
    from weft.optim.codec_kernels import round_bits

    round_bits(values, stored, 16, _keys(rounding))


BF16 = StateCodec(torch.bfloat16, lambda shape: shape, _to_bf16, _from_bf16, encode_kernel=_bf16_kernel)
LOW_BYTE = StateCodec(
    torch.int8, lambda shape: shape, _to_byte, _from_byte, torch.int16,
    encode_kernel=_to_byte, decode_kernel=_from_byte,
)  # fmt: skip
"""The upper byte of a low half, after round_to_24_bits_()."""
EIGHT_BITS = {kind: _eight_bits(kind) for kind in LEVELS}


def codec_of(states: str, kind: str, shape: tuple[int, ...]) -> StateCodec | None:
    """How a state of a weight of this shape is stored with a setting of memory.states; None: as it is."""
    if states == "exact" or len(shape) < 2 or shape[-1] < MIN_CODED_COLUMNS or kind == "ema":
        return None
    if kind == "low":
        return LOW_BYTE if states == "24bit-master" else None
    return BF16 if states == "bf16" else EIGHT_BITS["unsigned" if kind in UNSIGNED else "signed"]


def round_to_24_bits_(master: Tensor, rounding: Rounding | None) -> None:
    """Round fp32 weights, in place, so that the lowest 8 bits are 0."""
    if master.is_cuda and master.is_contiguous():
        from weft.optim.codec_kernels import round_bits

        values = master.view(-1, master.shape[-1])
        round_bits(values, values, 8, _keys(rounding))
        return
    flat = master.view(torch.int32).view(-1, master.shape[-1])
    for first, end in _chunks(flat):
        added = 0x80 if rounding is None else (rounding.draw(first, end, flat.shape[1]) & 0xFF).to(torch.int32)
        flat[first:end].add_(added).bitwise_and_(~0xFF)
