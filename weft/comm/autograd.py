"""Differentiable collectives, in pairs of which each is the gradient of the other (Megatron's f and g)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.comm.axis import Axis

Operation = Callable[[Axis, Tensor, int], Tensor]
"""Takes an axis, a tensor and a dim."""


def _gather(axis: Axis, x: Tensor, dim: int) -> Tensor:
    return axis.all_gather(x, dim)


def _scatter(axis: Axis, x: Tensor, dim: int) -> Tensor:
    return axis.reduce_scatter(x, dim)


def _narrow(axis: Axis, x: Tensor, dim: int) -> Tensor:
    return axis.narrow(x, dim).contiguous()


def _sum(axis: Axis, x: Tensor, dim: int) -> Tensor:
    return axis.all_reduce(x.contiguous().clone())


def _same(axis: Axis, x: Tensor, dim: int) -> Tensor:
    return x.view_as(x)


class _Pair(torch.autograd.Function):
    """One operation in the forward pass, another one on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, there: Operation, back: Operation) -> Tensor:
        ctx.axis, ctx.dim, ctx.back = axis, dim, back
        return there(axis, x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(ctx.axis, grads[0], ctx.dim), None, None, None, None


def _apply(x: Tensor, axis: Axis, dim: int, there: Operation, back: Operation) -> Tensor:
    out: Tensor = _Pair.apply(x, axis, dim, there, back)
    return out


def gather_along(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Concatenate the ranks' shards along dim; the gradient is reduce-scattered."""
    return _apply(x, axis, dim, _gather, _scatter)


def scatter_along(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum over the ranks and keep this rank's shard along dim; the gradient is gathered."""
    return _apply(x, axis, dim, _scatter, _gather)


def split_along(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's shard of a tensor that all ranks hold; the gradient is gathered."""
    return _apply(x, axis, dim, _narrow, _gather)


def join_along(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Concatenate the ranks' shards for a computation that all ranks repeat; the gradient is narrowed."""
    return _apply(x, axis, dim, _gather, _narrow)


def copy_in(x: Tensor, axis: Axis) -> Tensor:
    """The input, equal on every rank; the gradient is summed."""
    return _apply(x, axis, 0, _same, _sum)


def reduce_out(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks; the gradient is passed on."""
    return _apply(x, axis, 0, _sum, _same)


def sum_up(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks, which then compute different things; the gradient is summed too."""
    return _apply(x, axis, 0, _sum, _sum)
