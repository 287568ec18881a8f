"""fp8 casts on CUDA: values are scaled, cast and their maximum recorded in one pass, then transposed in fp8.

A product takes its left factor by rows and its right one by columns, and the backward pass the other way round. SwiGLU
is computed in the same pass as its cast, forward and backward, so that its results are never stored in bf16.

No kernel stores fp8 values both ways: ptxas 12.9 miscompiles the transposed store then, and writes wrong bytes
(triton-lang/triton#11111).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TRANSPOSE_TILE, CAST_BLOCK, SWIGLU_BLOCK = (128, 128), 8192, 4096
"""Rows and columns of a tile of a transpose; values that one program casts."""


@triton.jit
def _block(count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at < count


@triton.jit
def _put(v, scale, out, seen, at, inside, LIMIT: tl.constexpr):
    tl.atomic_max(seen, tl.max(tl.abs(v)))
    scaled = tl.minimum(tl.maximum(v * tl.load(scale), -LIMIT), LIMIT)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def weft_cast(x, scale, out, seen, count, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at, inside = _block(count, BLOCK)
    _put(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), scale, out, seen, at, inside, LIMIT)


@triton.jit
def weft_cast_rows(x, scale, out, count, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at, inside = _block(count, BLOCK)
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    tl.store(out + at, tl.minimum(tl.maximum(v, -LIMIT), LIMIT).to(out.dtype.element_ty), mask=inside)


@triton.jit
def weft_transpose(x, out, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    v = tl.load(x + r[:, None] * columns + c[None, :], mask=inside, other=0)
    tl.store(out + c[:, None] * stride + r[None, :], tl.trans(v), mask=tl.trans(inside))


@triton.jit
def weft_swiglu(gate, up, scale, out, seen, count, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at, inside = _block(count, BLOCK)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    _put(g / (1.0 + tl.exp(-g)) * u, scale, out, seen, at, inside, LIMIT)


@triton.jit
def weft_swiglu_back(
    gate, up, grad, scale_gate, scale_up, out_gate, out_up, seen_gate, seen_up, count,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at, inside = _block(count, BLOCK)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    _put(d * u * s * (1.0 + g * (1.0 - s)), scale_gate, out_gate, seen_gate, at, inside, LIMIT)
    _put(d * g * s, scale_up, out_up, seen_up, at, inside, LIMIT)


def _launch(kernel, dtype: torch.dtype, count: int, *given: Tensor, block: int = CAST_BLOCK) -> None:
    kernel[(triton.cdiv(count, block),)](*given, count, LIMIT=torch.finfo(dtype).max, BLOCK=block, num_warps=8)


def cast_rows(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x · scale in fp8."""
    x = x.contiguous()
    out = x.new_empty(x.shape, dtype=dtype)
    _launch(weft_cast_rows, dtype, x.numel(), x, scale, out)
    return out


def transpose(x: Tensor, out: Tensor) -> None:
    """Transpose fp8 values [rows, columns] into out [columns, rows]."""
    rows, columns = x.shape
    high, wide = TRANSPOSE_TILE
    weft_transpose[(triton.cdiv(rows, high), triton.cdiv(columns, wide))](
        x.contiguous().view(torch.uint8), out.view(torch.uint8), rows, columns, out.stride(0),
        ROWS=high, COLUMNS=wide, num_warps=4,
    )  # fmt: skip


def _both(by_rows: Tensor) -> tuple[Tensor, Tensor]:
    by_columns = by_rows.new_empty(by_rows.shape[::-1])
    transpose(by_rows, by_columns)
    return by_rows, by_columns


@torch.library.custom_op("weft::cast_both", mutates_args=("seen",))
def cast_both(x: Tensor, scale: Tensor, seen: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [rows, columns] · scale in fp8, by rows and by columns; `seen` becomes at least x's largest magnitude."""
    x = x.contiguous()
    out = x.new_empty(x.shape, dtype=dtype)
    _launch(weft_cast, dtype, x.numel(), x, scale, out, seen)
    return _both(out)


@torch.library.custom_op("weft::swiglu_both", mutates_args=("seen",))
def swiglu_both(gate: Tensor, up: Tensor, scale: Tensor, seen: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """silu(gate) · up · scale in fp8, by rows and by columns."""
    gate, up = gate.contiguous(), up.contiguous()
    out = gate.new_empty(gate.shape, dtype=dtype)
    _launch(weft_swiglu, dtype, gate.numel(), gate, up, scale, out, seen, block=SWIGLU_BLOCK)
    return _both(out)


@torch.library.custom_op("weft::swiglu_back_both", mutates_args=("seen_gate", "seen_up"))
def swiglu_back_both(
    gate: Tensor, up: Tensor, grad: Tensor, scale_gate: Tensor, scale_up: Tensor, seen_gate: Tensor, seen_up: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of both factors of SwiGLU in fp8, each by rows and by columns."""
    given = gate.contiguous(), up.contiguous(), grad.contiguous(), scale_gate, scale_up
    out = [gate.new_empty(gate.shape, dtype=dtype) for _ in range(2)]
    _launch(weft_swiglu_back, dtype, gate.numel(), *given, *out, seen_gate, seen_up, block=SWIGLU_BLOCK)
    return *_both(out[0]), *_both(out[1])


def _shapes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype)


@cast_both.register_fake
def _(x: Tensor, scale: Tensor, seen: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _shapes(x, dtype)


@swiglu_both.register_fake
def _(gate: Tensor, up: Tensor, scale: Tensor, seen: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _shapes(gate, dtype)


@swiglu_back_both.register_fake
def _(
    gate: Tensor, up: Tensor, grad: Tensor, scale_gate: Tensor, scale_up: Tensor, seen_gate: Tensor, seen_up: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return *_shapes(gate, dtype), *_shapes(gate, dtype)
