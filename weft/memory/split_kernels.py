"""Join and split of master weights on CUDA, one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def weft_join(high, low, whole, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    top = tl.load(high + at, mask=inside).to(tl.int16, bitcast=True).to(tl.int32)
    bits = (top << 16) + tl.load(low + at, mask=inside).to(tl.int32)
    tl.store(whole + at, bits.to(tl.float32, bitcast=True), mask=inside)


@triton.jit
def weft_split(whole, high, low, size, LOW: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    bits = tl.load(whole + at, mask=inside).to(tl.int32, bitcast=True)
    tl.store(high + at, ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    if LOW:
        tl.store(low + at, bits.to(tl.int16), mask=inside)


def join_kernel(high: Tensor, low: Tensor, out: Tensor | None) -> Tensor:
    out = torch.empty_like(high, dtype=torch.float32) if out is None else out
    if size := high.numel():
        weft_join[(triton.cdiv(size, BLOCK),)](high, low, out, size, BLOCK=BLOCK, num_warps=8)
    return out


def split_kernel(master: Tensor, high: Tensor, low: Tensor | None) -> None:
    if size := master.numel():
        weft_split[(triton.cdiv(size, BLOCK),)](
            master, high, high if low is None else low, size, LOW=low is not None, BLOCK=BLOCK, num_warps=8
        )
