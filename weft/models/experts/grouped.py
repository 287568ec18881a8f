"""Rows sorted by expert: one product for all experts, and the permutations to that order and back.

Forward and backward are gathers, not atomic additions, so results are deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.comm.fake_internals import is_fake
from weft.models.kernel_internals import gradient_is_needed, grouped_mm


def product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each row by its expert's matrix: x [rows, in], weight [experts, out, in], counts [experts] that add up to rows.

    On a GPU this is torch's grouped product, which reads the counts on the device.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and len(x) and not weight.shape[1] % 8 and not weight.shape[2] % 8:
        return grouped_mm(x, weight.transpose(-2, -1), counts.cumsum(0).to(torch.int32))
    out: Tensor = _Product.apply(x, weight, counts)
    return out


class _Product(torch.autograd.Function):
    """One product per expert that has rows; the host reads the counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = known(counts, len(x))
        # selective recompute saves each product, so they must not share one buffer
        parts = [rows @ weight[e].t() for e, rows in zip(*_groups(ctx.counts, x), strict=True)]
        return torch.cat(parts) if parts else x.new_empty((0, weight.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        dx = torch.empty_like(x) if gradient_is_needed(ctx, 0) else None
        dw = torch.zeros_like(weight) if gradient_is_needed(ctx, 1) else None
        for e, rows, g, into in zip(*_groups(ctx.counts, x, grad, x if dx is None else dx), strict=True):
            if dx is not None:
                torch.mm(g, weight[e], out=into)
            if dw is not None:
                torch.mm(g.t(), rows, out=dw[e])
        return dx, dw, None


def add_bias(x: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """Each row and its expert's bias: x [rows, out], bias [experts, out], counts [experts]."""
    out: Tensor = _AddBias.apply(x, bias, counts)
    return out


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        ids = torch.repeat_interleave(counts, output_size=len(x))
        ctx.save_for_backward(ids)
        ctx.experts = len(bias)
        return x + bias.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        own = (torch.arange(ctx.experts, device=ids.device).unsqueeze(1) == ids).to(grads[0].dtype)  # [experts, rows]
        return grads[0], own @ grads[0], None


def known(counts: Tensor, total: int) -> list[int]:
    """Counts [n] as Python numbers. Fake tensors have no values: `total` is then divided evenly."""
    if is_fake(counts):
        each, more = divmod(total, len(counts))
        return [each + (i < more) for i in range(len(counts))]
    found: list[int] = counts.tolist()
    return found


def _groups(counts: list[int], *tensors: Tensor) -> list[list[Any]]:
    """The experts that have rows, and their rows of each tensor."""
    busy = [e for e, n in enumerate(counts) if n]
    return [busy, *([part for part in t.split(counts) if len(part)] for t in tensors)]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        if k == 1:
            return x.index_select(0, order)
        if x.is_cuda:
            return _kernels().spread(x, inverse.view(-1, k))
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        grad, k = grads[0], ctx.k
        if k > 1 and grad.is_cuda:
            return _kernels().gather(grad, None, inverse.view(-1, k)), None, None, None
        back = grad.index_select(0, inverse)
        return back.view(-1, k, back.shape[1]).sum(1) if k > 1 else back, None, None, None


def dispatch(x: Tensor, order: Tensor, inverse: Tensor, k: int = 1) -> Tensor:
    """Each row k times, sorted by expert: row i of the result is use order[i], and use j is row j // k."""
    out: Tensor = _Dispatch.apply(x, order, inverse, k)
    return out


class _GatherWeighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        if rows.is_cuda:
            return _kernels().gather(rows, weights, inverse.view(weights.shape))
        return _uses(rows, weights, inverse).mul_(weights.unsqueeze(2)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, order, inverse = ctx.saved_tensors
        grad = grads[0]
        if rows.is_cuda:
            return *_kernels().gather_back(grad, rows, weights, inverse.view(weights.shape)), None, None
        by_use = weights.flatten().index_select(0, order).unsqueeze(1)
        drows = grad.index_select(0, order // weights.shape[1]).mul_(by_use)
        dweights = torch.bmm(_uses(rows, weights, inverse), grad.unsqueeze(2)).squeeze(2)
        return drows, dweights, None, None


def _kernels() -> Any:
    """Triton kernels that do each permutation in one pass."""
    from weft.models.experts import grouped_kernels

    return grouped_kernels


def _uses(rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    """The sorted rows as [tokens, k, dim]."""
    return rows.index_select(0, inverse).view(*weights.shape, rows.shape[1])


def gather_weighted(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """The weighted sum of each token's k sorted rows: [tokens, dim] by weights [tokens, k]."""
    out: Tensor = _GatherWeighted.apply(rows, weights, order, inverse)
    return out
