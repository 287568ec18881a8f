"""fp8 casts on CUDA in one pass: each value is read once and written by rows and by columns, and the maximum recorded.

A product takes its left factor by rows and its right one by columns, and the backward pass the other way round. SwiGLU
is computed in the same pass as its cast, forward and backward, so that its results are never stored in bf16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CAST_TILE = 64, 64
SWIGLU_TILE = 64, 128
"""Rows and columns of a tile, the fastest on an H200."""
TRANSPOSE_TILE, CAST_BLOCK = (128, 128), 8192
"""Tile of a plain transpose, and values that one program casts."""


@triton.jit
def _put(v, scale, by_rows, by_columns, seen, r, c, rows, columns, inside, LIMIT: tl.constexpr):
    tl.atomic_max(seen, tl.max(tl.abs(v)))
    scaled = tl.minimum(tl.maximum(v * tl.load(scale), -LIMIT), LIMIT).to(by_rows.dtype.element_ty)
    tl.store(by_rows + r[:, None] * columns + c[None, :], scaled, mask=inside)
    tl.store(by_columns + c[:, None] * rows + r[None, :], tl.trans(scaled), mask=tl.trans(inside))


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return r, c, (r < rows)[:, None] & (c < columns)[None, :]


@triton.jit
def weft_cast_both(
    x, scale, by_rows, by_columns, seen, rows, columns,
    LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r, c, inside = _tile(rows, columns, ROWS, COLUMNS)
    v = tl.load(x + r[:, None] * columns + c[None, :], mask=inside, other=0.0).to(tl.float32)
    _put(v, scale, by_rows, by_columns, seen, r, c, rows, columns, inside, LIMIT)


@triton.jit
def weft_cast_rows(x, scale, out, count, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(scale)
    tl.store(out + at, tl.minimum(tl.maximum(v, -LIMIT), LIMIT).to(out.dtype.element_ty), mask=at < count)


@triton.jit
def weft_transpose(x, out, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r, c, inside = _tile(rows, columns, ROWS, COLUMNS)
    v = tl.load(x + r[:, None] * columns + c[None, :], mask=inside, other=0)
    tl.store(out + c[:, None] * stride + r[None, :], tl.trans(v), mask=tl.trans(inside))


@triton.jit
def weft_swiglu_both(
    gate, up, scale, by_rows, by_columns, seen, rows, columns,
    LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r, c, inside = _tile(rows, columns, ROWS, COLUMNS)
    at = r[:, None] * columns + c[None, :]
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    v = g / (1.0 + tl.exp(-g)) * u
    _put(v, scale, by_rows, by_columns, seen, r, c, rows, columns, inside, LIMIT)


@triton.jit
def weft_swiglu_back_both(
    gate, up, grad, scale_gate, scale_up, gate_rows, gate_columns, up_rows, up_columns, seen_gate, seen_up,
    rows, columns, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r, c, inside = _tile(rows, columns, ROWS, COLUMNS)
    at = r[:, None] * columns + c[None, :]
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    _put(d * u * s * (1.0 + g * (1.0 - s)), scale_gate, gate_rows, gate_columns, seen_gate, r, c, rows, columns,
         inside, LIMIT)  # fmt: skip
    _put(d * g * s, scale_up, up_rows, up_columns, seen_up, r, c, rows, columns, inside, LIMIT)


def _made(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype)


def _launch(kernel, x: Tensor, dtype: torch.dtype, *given: Tensor, tile: tuple[int, int] = CAST_TILE) -> None:
    rows, columns = x.shape
    high, wide = tile
    kernel[(triton.cdiv(rows, high), triton.cdiv(columns, wide))](
        *given, rows, columns, LIMIT=torch.finfo(dtype).max, ROWS=high, COLUMNS=wide, num_warps=4
    )


def cast_rows(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x · scale in fp8."""
    x = x.contiguous()
    out = x.new_empty(x.shape, dtype=dtype)
    grid = (triton.cdiv(x.numel(), CAST_BLOCK),)
    weft_cast_rows[grid](x, scale, out, x.numel(), LIMIT=torch.finfo(dtype).max, BLOCK=CAST_BLOCK, num_warps=8)
    return out


def transpose(x: Tensor, out: Tensor) -> None:
    """Transpose fp8 values [rows, columns] into out [columns, rows]."""
    rows, columns = x.shape
    high, wide = TRANSPOSE_TILE
    weft_transpose[(triton.cdiv(rows, high), triton.cdiv(columns, wide))](
        x.contiguous().view(torch.uint8), out.view(torch.uint8), rows, columns, out.stride(0),
        ROWS=high, COLUMNS=wide, num_warps=4,
    )  # fmt: skip


@torch.library.custom_op("weft::cast_both", mutates_args=("seen",))
def cast_both(x: Tensor, scale: Tensor, seen: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [rows, columns] · scale in fp8, by rows and by columns; `seen` becomes at least x's largest magnitude."""
    x = x.contiguous()
    out = _made(x, dtype)
    _launch(weft_cast_both, x, dtype, x, scale, *out, seen)
    return out


@torch.library.custom_op("weft::swiglu_both", mutates_args=("seen",))
def swiglu_both(gate: Tensor, up: Tensor, scale: Tensor, seen: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """silu(gate) · up · scale in fp8, by rows and by columns."""
    gate, up = gate.contiguous(), up.contiguous()
    out = _made(gate, dtype)
    _launch(weft_swiglu_both, gate, dtype, gate, up, scale, *out, seen, tile=SWIGLU_TILE)
    return out


@torch.library.custom_op("weft::swiglu_back_both", mutates_args=("seen_gate", "seen_up"))
def swiglu_back_both(
    gate: Tensor, up: Tensor, grad: Tensor, scale_gate: Tensor, scale_up: Tensor, seen_gate: Tensor, seen_up: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of both factors of SwiGLU in fp8, each by rows and by columns."""
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    of_gate, of_up = _made(gate, dtype), _made(gate, dtype)
    _launch(
        weft_swiglu_back_both, gate, dtype, gate, up, grad, scale_gate, scale_up, *of_gate, *of_up, seen_gate, seen_up
    )
    return *of_gate, *of_up


@cast_both.register_fake
def _(x: Tensor, scale: Tensor, seen: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _made(x, dtype)


@swiglu_both.register_fake
def _(gate: Tensor, up: Tensor, scale: Tensor, seen: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _made(gate, dtype)


@swiglu_back_both.register_fake
def _(
    gate: Tensor, up: Tensor, grad: Tensor, scale_gate: Tensor, scale_up: Tensor, seen_gate: Tensor, seen_up: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return *_made(gate, dtype), *_made(gate, dtype)
