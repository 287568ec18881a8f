"""Tokens to the rows of their experts and back on CUDA, each in one pass: one program per token, which has k uses.

`places` [tokens, k] are the indices of a token's uses among the rows sorted by expert. Sums are in fp32 and in the
order of the uses, so they are deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def weft_spread(x, places, rows, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + token * width + at, mask=at < width)
    for j in range(K):
        place = tl.load(places + token * K + j)
        tl.store(rows + place * width + at, value, mask=at < width)


@triton.jit
def weft_gather(rows, weights, places, y, width, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(K):
        place = tl.load(places + token * K + j)
        value = tl.load(rows + place * width + at, mask=at < width, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * K + j).to(tl.float32)
        total += value
    tl.store(y + token * width + at, total.to(y.dtype.element_ty), mask=at < width)


@triton.jit
def weft_gather_back(
    grad, rows, weights, places, of_rows, of_weights, width, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    g = tl.load(grad + token * width + at, mask=at < width, other=0.0).to(tl.float32)
    for j in range(K):
        use = token * K + j
        here = tl.load(places + use) * width + at
        value = tl.load(rows + here, mask=at < width, other=0.0).to(tl.float32)
        tl.store(of_weights + use, tl.sum(value * g).to(of_weights.dtype.element_ty))
        mine = g * tl.load(weights + use).to(tl.float32)
        tl.store(of_rows + here, mine.to(of_rows.dtype.element_ty), mask=at < width)


def _launch(kernel, tokens: int, *given: Tensor, width: int, **fixed: int) -> None:
    if tokens:
        kernel[(tokens,)](*given, width, BLOCK=triton.next_power_of_2(width), num_warps=4, **fixed)


def spread(x: Tensor, places: Tensor) -> Tensor:
    """Each token [tokens, width] at each of its places: [tokens · k, width]."""
    rows = x.new_empty((places.numel(), x.shape[1]))
    _launch(weft_spread, len(x), x.contiguous(), places, rows, width=x.shape[1], K=places.shape[1])
    return rows


def gather(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    """The sum of each token's rows [tokens, width], weighted by `weights` [tokens, k] if given."""
    rows, weighted = rows.contiguous(), weights is not None
    y = rows.new_empty((places.shape[0], rows.shape[1]))
    by = rows if weights is None else weights.contiguous()
    _launch(weft_gather, len(y), rows, by, places, y, width=rows.shape[1], K=places.shape[1], WEIGHTED=weighted)
    return y


def gather_back(grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights of gather()."""
    grad, rows, weights = grad.contiguous(), rows.contiguous(), weights.contiguous()
    of_rows, of_weights = torch.empty_like(rows), torch.empty_like(weights)
    width, k = rows.shape[1], places.shape[1]
    _launch(weft_gather_back, len(grad), grad, rows, weights, places, of_rows, of_weights, width=width, K=k)
    return of_rows, of_weights
