"""Join and split of master weights on CUDA, one pass each; and one launch that rounds many weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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


@triton.jit
def weft_round_many(table, of_program, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = table + 4 * tl.load(of_program + program)  # addresses of source and target, size, first program
    source = tl.load(row).to(tl.pointer_type(tl.float32))
    target = tl.load(row + 1).to(tl.pointer_type(tl.bfloat16))
    at = (program - tl.load(row + 3)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(row + 2)
    bits = tl.load(source + at, mask=inside).to(tl.int32, bitcast=True)
    tl.store(target + at, ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)


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


def round_kernel(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Round fp32 tensors to bf16, as split_kernel does. All are contiguous and on one device."""
    rows = tuple((s.data_ptr(), t.data_ptr(), s.numel()) for s, t in zip(sources, targets, strict=True) if s.numel())
    if rows:
        table, of_program = _programs(rows, sources[0].device)
        weft_round_many[(len(of_program),)](table, of_program, BLOCK=BLOCK, num_warps=8)


@lru_cache(maxsize=8)
def _programs(rows: tuple[tuple[int, int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """A row for each tensor, and the row of each program. Weights keep their addresses, so it is made once."""
    counts = torch.tensor([triton.cdiv(size, BLOCK) for _, _, size in rows])
    first = counts.cumsum(0) - counts
    table = torch.cat([torch.tensor(rows), first[:, None]], 1)
    return table.to(device), torch.arange(len(rows)).repeat_interleave(counts).to(device)
