"""fp8 casts on CUDA: values are scaled, cast and their maximum recorded in one pass, then transposed in fp8.

A product takes its left factor by rows and its right one by columns, and the backward pass the other way round. SwiGLU
is computed in the same pass as its cast, forward and backward, so that its results are never stored in bf16.

No kernel stores fp8 values both ways: ptxas 12.9 miscompiles the transposed store then, and writes wrong bytes
(triton-lang/triton#11111). And no operation writes into its arguments: torch.compile puts what an operation writes into
a view of a larger table at the wrong place of it, so maxima are results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TRANSPOSE_TILE, CAST_COLUMNS_TILE = (128, 128), (64, 128)
"""Rows and columns of a tile."""
CAST_BLOCK, CAST_PROGRAMS = 1024, 2112
"""Values that a program casts at once, and the most programs: each ends with an atomic maximum on one number, and many
of them would wait for each other."""


@triton.jit
def _block(b, count, BLOCK: tl.constexpr):
    at = b * tl.full([], BLOCK, tl.int64) + tl.arange(0, BLOCK)
    return at, at < count


@triton.jit
def _put(v, scale, out, at, inside, LIMIT: tl.constexpr):
    scaled = tl.minimum(tl.maximum(v * scale, -LIMIT), LIMIT)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def weft_cast(x, scale, out, seen, count, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    s, most = tl.load(scale), tl.zeros([BLOCK], tl.float32)
    for b in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at, inside = _block(b, count, BLOCK)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        _put(v, s, out, at, inside, LIMIT)
        most = tl.maximum(most, tl.abs(v))
    tl.atomic_max(seen, tl.max(most))


@triton.jit
def weft_cast_rows(x, scale, out, count, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    s = tl.load(scale)
    for b in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at, inside = _block(b, count, BLOCK)
        _put(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), s, out, at, inside, LIMIT)


@triton.jit
def weft_cast_columns(
    x, scale, out, rows, columns, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    v = tl.load(x + r[:, None] * columns + c[None, :], mask=inside, other=0.0).to(tl.float32)
    _put(tl.trans(v), tl.load(scale), out, c[:, None] * rows + r[None, :], tl.trans(inside), LIMIT)


@triton.jit
def weft_transpose(x, out, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    v = tl.load(x + r[:, None] * columns + c[None, :], mask=inside, other=0)
    tl.store(out + c[:, None] * stride + r[None, :], tl.trans(v), mask=tl.trans(inside))


@triton.jit
def weft_swiglu(gate, up, scale, out, seen, count, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    s, most = tl.load(scale), tl.zeros([BLOCK], tl.float32)
    for b in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at, inside = _block(b, count, BLOCK)
        g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        h = g / (1.0 + tl.exp(-g)) * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        _put(h, s, out, at, inside, LIMIT)
        most = tl.maximum(most, tl.abs(h))
    tl.atomic_max(seen, tl.max(most))


@triton.jit
def weft_swiglu_back(
    gate, up, grad, scale_gate, scale_up, scale_h, out_gate, out_up, out_h, seen_gate, seen_up, count,
    LIMIT: tl.constexpr, LIMIT_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    of_gate, of_up, of_h = tl.load(scale_gate), tl.load(scale_up), tl.load(scale_h)
    most_gate, most_up = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for b in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at, inside = _block(b, count, BLOCK)
        g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        e = 1.0 + tl.exp(-g)
        s = 1.0 / e
        by_gate, by_up = d * u * s * (1.0 + g * (1.0 - s)), d * g * s
        _put(by_gate, of_gate, out_gate, at, inside, LIMIT)
        _put(by_up, of_up, out_up, at, inside, LIMIT)
        _put(g / e * u, of_h, out_h, at, inside, LIMIT_H)
        most_gate, most_up = tl.maximum(most_gate, tl.abs(by_gate)), tl.maximum(most_up, tl.abs(by_up))
    tl.atomic_max(seen_gate, tl.max(most_gate))
    tl.atomic_max(seen_up, tl.max(most_up))


def _launch(kernel, dtype: torch.dtype, count: int, *given: Tensor, **limits: float) -> None:
    limit, programs = torch.finfo(dtype).max, min(CAST_PROGRAMS, triton.cdiv(count, CAST_BLOCK))
    kernel[(programs,)](*given, count, LIMIT=limit, BLOCK=CAST_BLOCK, num_warps=4, **limits)


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


def _maximum(x: Tensor) -> Tensor:
    return x.new_zeros(1, dtype=torch.float32)


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, seen = x.contiguous(), _maximum(x)
    out = x.new_empty(x.shape, dtype=dtype)
    _launch(weft_cast, dtype, x.numel(), x, scale, out, seen)
    return out, seen


@torch.library.custom_op("weft::cast_seen", mutates_args=())
def cast_seen(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x · scale in fp8, and x's largest magnitude [1]."""
    return _cast(x, scale, dtype)


@torch.library.custom_op("weft::cast_columns", mutates_args=())
def cast_columns(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [rows, columns] · scale in fp8, by columns."""
    (rows, columns), (high, wide) = x.shape, CAST_COLUMNS_TILE
    out = x.new_empty(columns, rows, dtype=dtype)
    weft_cast_columns[(triton.cdiv(rows, high), triton.cdiv(columns, wide))](
        x.contiguous(), scale, out, rows, columns, LIMIT=torch.finfo(dtype).max, ROWS=high, COLUMNS=wide, num_warps=4
    )
    return out


@torch.library.custom_op("weft::cast_both", mutates_args=())
def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, columns] · scale in fp8, by rows and by columns, and x's largest magnitude."""
    out, seen = _cast(x, scale, dtype)
    return *_both(out), seen


@torch.library.custom_op("weft::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """silu(gate) · up · scale in fp8, and its largest magnitude before scaling."""
    gate, up, seen = gate.contiguous(), up.contiguous(), _maximum(gate)
    out = gate.new_empty(gate.shape, dtype=dtype)
    _launch(weft_swiglu, dtype, gate.numel(), gate, up, scale, out, seen)
    return out, seen


@torch.library.custom_op("weft::swiglu_back", mutates_args=())
def swiglu_back(
    gate: Tensor, up: Tensor, grad: Tensor, scale_gate: Tensor, scale_up: Tensor, scale_h: Tensor,
    dtype: torch.dtype, dtype_h: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of both factors of SwiGLU in fp8, each by rows and by columns; its result by columns; and the
    largest magnitudes of both gradients."""
    given = gate.contiguous(), up.contiguous(), grad.contiguous(), scale_gate, scale_up, scale_h
    out = [gate.new_empty(gate.shape, dtype=kind) for kind in (dtype, dtype, dtype_h)]
    seen = _maximum(gate), _maximum(gate)
    _launch(weft_swiglu_back, dtype, gate.numel(), *given, *out, *seen,
            LIMIT_H=torch.finfo(dtype_h).max)  # fmt: skip
    return *_both(out[0]), *_both(out[1]), _both(out[2])[1], *seen


def _shapes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype)


@cast_seen.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), _maximum(x)


@cast_columns.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _shapes(x, dtype)[1]


@cast_both.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return *_shapes(x, dtype), _maximum(x)


@swiglu.register_fake
def _(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape, dtype=dtype), _maximum(gate)


@swiglu_back.register_fake
def _(
    gate: Tensor, up: Tensor, grad: Tensor, scale_gate: Tensor, scale_up: Tensor, scale_h: Tensor,
    dtype: torch.dtype, dtype_h: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    made = *_shapes(gate, dtype), *_shapes(gate, dtype), _shapes(gate, dtype_h)[1]
    return *made, _maximum(gate), _maximum(gate)
