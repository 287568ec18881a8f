"""Rows sorted by expert: one product for all experts, and the ways there and back, of which each undoes the other.

All of them are gathers in both directions, never sums into places, so the result does not depend on who came first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each row by its expert's matrix: x [rows, in], weight [experts, out, in], counts [experts] that add up to rows.

    On a GPU this is torch's grouped product, which reads the counts on the device.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and len(x) and not weight.shape[1] % 8 and not weight.shape[2] % 8:
        return grouped_mm(x, weight.transpose(-2, -1), counts.cumsum(0).to(torch.int32))
    out: Tensor = _Product.apply(x, weight, counts)
    return out


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped product: rows up to ends[0] by weight[0], from there to ends[1] by weight[1], and so on."""
    return torch._grouped_mm(x, weight, offs=ends)


class _Product(torch.autograd.Function):
    """One product an expert that has rows; the counts are read by the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = known(counts, len(x))
        # selective recompute keeps each product, so none may be a piece of what the next one writes to
        parts = [rows @ weight[e].t() for e, rows in zip(*_groups(ctx.counts, x), strict=True)]
        return torch.cat(parts) if parts else x.new_empty((0, weight.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        dx = torch.empty_like(x) if _wanted(ctx, 0) else None
        dw = torch.zeros_like(weight) if _wanted(ctx, 1) else None
        for e, rows, g, into in zip(*_groups(ctx.counts, x, grad, x if dx is None else dx), strict=True):
            if dx is not None:
                torch.mm(g, weight[e], out=into)
            if dw is not None:
                torch.mm(g.t(), rows, out=dw[e])
        return dx, dw, None


def _wanted(node: Any, index: int) -> bool:
    """Whether anything in this backward pass uses the gradient of an input: a split one asks for one at a time."""
    following = node.next_functions[index][0]
    try:
        return following is not None and torch._C._will_engine_execute_node(following)
    except RuntimeError:  # of a leaf under autograd.grad() torch does not tell
        return True


def known(counts: Tensor, total: int) -> list[int]:
    """Counts [n] of which the host must know the values. A dry run has none: there, `total` is shared evenly."""
    if isinstance(counts, FakeTensor):
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
    """Each row k times, in the order of its k uses: row i of the result is use order[i], and use j is row j // k."""
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
    """What a GPU makes each way in one pass with."""
    from weft.models import grouped_kernels

    return grouped_kernels


def _uses(rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    """The sorted rows as [tokens, k, dim]."""
    return rows.index_select(0, inverse).view(*weights.shape, rows.shape[1])


def gather_weighted(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Sorted rows back to their tokens: the sum of each token's k rows [tokens, dim] by its weights [tokens, k]."""
    out: Tensor = _GatherWeighted.apply(rows, weights, order, inverse)
    return out
