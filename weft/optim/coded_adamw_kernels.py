"""AdamW on CUDA with moments in 8 bits, in one pass: the same bits as decoding, adamw_() and encoding, but 12 bytes of
memory traffic per parameter instead of 84 (with 24-bit master weights)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.optim.adamw_kernels import update
from weft.optim.codec_kernels import blocks_of_program, decode_block, encode_block, random_bits, random_share
from weft.optim.state_codecs import LEVELS, POWERS, CodedState
from weft.planner.engine_constants import STATE_SCALE_BLOCK

GROUPS = 8
"""Blocks of elements that one program updates."""
SIGNED, UNSIGNED = tl.constexpr(float(LEVELS["signed"])), tl.constexpr(float(LEVELS["unsigned"]))
SQUARE, FOURTH = tl.constexpr(POWERS["signed"]), tl.constexpr(POWERS["unsigned"])


@triton.jit(do_not_specialize=["mean_key", "square_key", "low_key", "first_column"])
def weft_coded_adamw(
    master, copy, grad, mean, square, factor, taken, corrections, lr, beta1, beta2, eps, decay, rows, mean_key,
    square_key, low_key, first_column, columns, gamma, width, stride, blocks, groups, COPY: tl.constexpr,
    LOW_BITS: tl.constexpr, SCALE_BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    wanted = tl.where(tl.load(taken) != 0, groups, 0)  # a skipped step reads and writes nothing
    exists, row, block, column, inside = blocks_of_program(blocks, wanted, width, SCALE_BLOCK, GROUPS)
    at, coded = row[:, None] * width + column, row[:, None] * stride
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    m = decode_block(mean + coded, block, column, exists, inside, width, SIGNED, SQUARE)
    v = decode_block(square + coded, block, column, exists, inside, width, UNSIGNED, FOURTH)
    if LOW_BITS == 0:
        w = tl.load(master + at, mask=inside, other=0.0)
    else:  # the master weight is the compute weight and low bits (memory/split_master.py)
        high = tl.load(copy + at, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(master + at, mask=inside, other=0).to(tl.int32) << (16 - LOW_BITS)
        w = ((high << 16) + low).to(tl.float32, bitcast=True)
    m, v, w = update(g, m, v, w, corrections, lr, beta1, beta2, eps, decay)
    first = (tl.load(rows + row, mask=exists, other=0) * columns + first_column)[:, None]
    limit = random_share(first, column, mean_key, gamma)
    encode_block(m, limit, mean + coded, block, column, exists, inside, width, SIGNED, SQUARE)
    limit = random_share(first, column, square_key, gamma)
    encode_block(v, limit, square + coded, block, column, exists, inside, width, UNSIGNED, FOURTH)
    bits = w.to(tl.int32, bitcast=True)
    if LOW_BITS == 8:
        bits = ((bits + (random_bits(first, column, low_key, gamma) & 0xFF)) >> 8) << 8
    if LOW_BITS == 0:
        tl.store(master + at, w, mask=inside)
    else:
        tl.store(master + at, (bits.to(tl.int16) >> (16 - LOW_BITS)).to(master.dtype.element_ty), mask=inside)
    if COPY:
        if copy.dtype.element_ty == tl.bfloat16:
            tl.store(copy + at, ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        else:
            tl.store(copy + at, w.to(copy.dtype.element_ty), mask=inside)


def coded_adamw_(
    master: Tensor | CodedState, copy: Tensor | None, grad: Tensor, mean: CodedState, square: CodedState,
    factor: Tensor, taken: Tensor, corrections: Tensor, lr: float, betas: tuple[float, float], eps: float,
    decay: float,
) -> None:  # fmt: skip
    """adamw_() with coded moments. A coded `master` is the low half of a split master weight in 8 bits."""
    coded = isinstance(master, CodedState)
    values = master.stored if isinstance(master, CodedState) else master
    size, width = values.numel(), values.shape[-1]
    if not size:
        return
    blocks = triton.cdiv(width, STATE_SCALE_BLOCK)
    groups = size // width * blocks
    rows, mean_key, *where = mean.rounding.keys
    weft_coded_adamw[(triton.cdiv(groups, GROUPS),)](
        values, values if copy is None else copy, grad.contiguous(), mean.stored, square.stored, factor, taken,
        corrections, lr, betas[0], betas[1], eps, decay, rows, mean_key, square.rounding.key,
        master.rounding.key if isinstance(master, CodedState) else 0, *where, width, mean.stored.shape[-1], blocks,
        groups, COPY=copy is not None, LOW_BITS=8 if coded else 16 if values.dtype == torch.int16 else 0,
        SCALE_BLOCK=STATE_SCALE_BLOCK, GROUPS=GROUPS, enable_fp_fusion=False,
    )  # fmt: skip
