"""Codecs of smaller states on CUDA, one pass each: the same bits as the chains of torch operations in state_codecs.py.

Divisions and roots are rounded as IEEE 754 demands, and products are not fused with sums, as in torch's own kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.planner.engine_constants import STATE_SCALE_BLOCK

GROUPS = 8
"""Blocks of elements that one program encodes or decodes."""
BLOCK = 1024
Keys = tuple[Tensor, int, int, int, int]
"""What random numbers depend on: the numbers of rows, the key, the first column, the columns of the whole weight, and
the factor of an element's number (state_codecs.Rounding)."""


@triton.jit
def random_bits(first, column, key, gamma):
    """24 random bits of each element (Rounding.draw), from the number of its row's first element."""
    h = ((first + column) * gamma + key).to(tl.uint64, bitcast=True)
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB
    return ((h ^ (h >> 31)) >> 40).to(tl.int32)


@triton.jit
def random_share(first, column, key, gamma):
    """A random number from 0 to 1 of each element."""
    return random_bits(first, column, key, gamma).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _level(code, LEVELS: tl.constexpr, POWER: tl.constexpr):
    share = tl.div_rn(code, tl.full(code.shape, LEVELS, tl.float32))
    share = share * share
    if POWER == 4:
        share = share * share
    return share


@triton.jit
def blocks_of_program(blocks, groups, width, SCALE_BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """Of each block of a program: whether it exists, its row and its number there; and the columns of its elements with
    whether they exist."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    block = group % blocks
    column = block[:, None] * SCALE_BLOCK + tl.arange(0, SCALE_BLOCK)[None, :]
    exists = group < groups
    return exists, group // blocks, block, column, exists[:, None] & (column < width)


@triton.jit
def decode_block(source, block, column, exists, inside, width, LEVELS: tl.constexpr, POWER: tl.constexpr):
    """The values of blocks from their rows of bytes: the codes, then the scales."""
    byte = tl.arange(0, 4)[None, :]
    part = tl.load(source + width + 4 * block[:, None] + byte, mask=exists[:, None] & (byte < 4), other=0)
    scale = tl.sum(part.to(tl.int32) << (8 * byte), 1).to(tl.float32, bitcast=True)
    code = tl.load(source + column, mask=inside, other=0).to(tl.int32)
    if POWER == 2:
        code = tl.where(code > 127, code - 256, code)
    value = _level(code.to(tl.float32), LEVELS, POWER) * scale[:, None]
    if POWER == 2:
        value = value * tl.where(code > 0, 1.0, tl.where(code < 0, -1.0, 0.0))
    return value


@triton.jit
def encode_block(value, limit, target, block, column, exists, inside, width, LEVELS: tl.constexpr, POWER: tl.constexpr):
    """Write the codes and scales of blocks. A value is rounded up if its distance from the lower code, as a share of
    the step, is above `limit`."""
    size = tl.abs(value)
    scale = tl.max(size, 1)
    safe = tl.where(scale > 0, scale, 1.0)
    share = tl.div_rn(size, tl.broadcast_to(safe[:, None], size.shape))
    share = tl.where(share == share, share, 0.0)
    root = tl.sqrt_rn(share)
    if POWER == 4:
        root = tl.sqrt_rn(root)
    code = tl.minimum(tl.floor(root * LEVELS), LEVELS - 1.0)
    lower = _level(code, LEVELS, POWER)
    up = tl.div_rn(share - lower, _level(code + 1.0, LEVELS, POWER) - lower)
    code += tl.where(up > limit, 1.0, 0.0)
    if POWER == 4:
        code = tl.where(share > 0, tl.maximum(code, 1.0), 0.0)
    else:
        code = tl.where(value < 0, -code, tl.where(value > 0, code, 0.0))
    tl.store(target + column, code.to(tl.int32).to(tl.uint8), mask=inside)
    bits = scale.to(tl.int32, bitcast=True)
    byte = tl.arange(0, 4)[None, :]
    tl.store(
        target + width + 4 * block[:, None] + byte, ((bits[:, None] >> (8 * byte)) & 0xFF).to(tl.uint8),
        mask=exists[:, None] & (byte < 4),
    )  # fmt: skip


@triton.jit(do_not_specialize=["key", "first_column"])
def weft_encode_8bit(
    values, stored, rows, key, first_column, columns, gamma, width, stride, blocks, groups, LEVELS: tl.constexpr,
    POWER: tl.constexpr, ROUNDED: tl.constexpr, SCALE_BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    exists, row, block, column, inside = blocks_of_program(blocks, groups, width, SCALE_BLOCK, GROUPS)
    value = tl.load(values + row[:, None] * width + column, mask=inside, other=0.0)
    if ROUNDED:
        first = tl.load(rows + row, mask=exists, other=0) * columns + first_column
        limit = random_share(first[:, None], column, key, gamma)
    else:
        limit = 0.5
    target = stored + row[:, None] * stride
    encode_block(value, limit, target, block, column, exists, inside, width, LEVELS, POWER)


@triton.jit
def weft_decode_8bit(
    stored, values, width, stride, blocks, groups, LEVELS: tl.constexpr, POWER: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    exists, row, block, column, inside = blocks_of_program(blocks, groups, width, SCALE_BLOCK, GROUPS)
    source = stored + row[:, None] * stride
    value = decode_block(source, block, column, exists, inside, width, LEVELS, POWER)
    tl.store(values + row[:, None] * width + column, value, mask=inside)


@triton.jit(do_not_specialize=["key", "first_column"])
def weft_round_bits(
    values, stored, rows, key, first_column, columns, gamma, width, blocks, ROUNDED: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Round fp32 numbers to 32 - BITS bits: to bf16, or in place."""
    row, block = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    bits = tl.load(values + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    if ROUNDED:
        bits += random_bits(tl.load(rows + row) * columns + first_column, column, key, gamma) & ((1 << BITS) - 1)
    else:
        bits += 1 << (BITS - 1)
    if BITS == 16:
        tl.store(stored + at, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(stored + at, ((bits >> BITS) << BITS).to(tl.float32, bitcast=True), mask=inside)


def round_bits(values: Tensor, stored: Tensor, bits: int, keys: Keys | None) -> None:
    """Round values [rows, columns] to bf16 (16 bits), or in place to 24 bits (8)."""
    rows, width = values.shape
    if values.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        blocks = triton.cdiv(width, block)
        weft_round_bits[(rows * blocks,)](
            values, stored, *_arguments(values, keys), width, blocks, ROUNDED=keys is not None, BITS=bits, BLOCK=block,
        )  # fmt: skip


def encode_8bit(values: Tensor, stored: Tensor, levels: int, power: int, keys: Keys | None) -> None:
    """Encode values [rows, columns] with a scale for each block of a row."""
    rows, width = values.shape
    blocks = triton.cdiv(width, STATE_SCALE_BLOCK)
    weft_encode_8bit[(triton.cdiv(rows * blocks, GROUPS),)](
        values, stored, *_arguments(values, keys), width, stored.stride(0), blocks, rows * blocks,
        LEVELS=float(levels), POWER=power, ROUNDED=keys is not None, SCALE_BLOCK=STATE_SCALE_BLOCK, GROUPS=GROUPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def decode_8bit(stored: Tensor, values: Tensor, levels: int, power: int) -> None:
    """Decode values [rows, columns]."""
    rows, width = values.shape
    blocks = triton.cdiv(width, STATE_SCALE_BLOCK)
    weft_decode_8bit[(triton.cdiv(rows * blocks, GROUPS),)](
        stored, values, width, stored.stride(0), blocks, rows * blocks, LEVELS=float(levels), POWER=power,
        SCALE_BLOCK=STATE_SCALE_BLOCK, GROUPS=GROUPS, enable_fp_fusion=False,
    )  # fmt: skip


def _arguments(values: Tensor, keys: Keys | None) -> tuple[Tensor, int, int, int, int]:
    return (values, 0, 0, 0, 0) if keys is None else keys
