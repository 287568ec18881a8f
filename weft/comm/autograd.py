"""Collectives that autograd can go back through: each is the other's gradient, in pairs (Megatron's f and g)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.comm.axis import Axis


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.reduce_scatter(grads[0], ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.all_gather(grads[0], ctx.dim), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.narrow(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.all_gather(grads[0], ctx.dim), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.narrow(grads[0], ctx.dim).contiguous(), None, None


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.all_reduce(grads[0].contiguous().clone()), None


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _SumUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.all_reduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.axis.all_reduce(grads[0].contiguous().clone()), None


def gather_along(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Join the ranks' shards along dim; the gradient is summed and cut again."""
    out: Tensor = _Gather.apply(x, axis, dim)
    return out


def scatter_along(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum over the ranks and keep this rank's shard along dim; the gradient is gathered."""
    out: Tensor = _Scatter.apply(x, axis, dim)
    return out


def split_along(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's shard of what all ranks hold; the gradient is gathered."""
    out: Tensor = _Split.apply(x, axis, dim)
    return out


def join_along(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The ranks' shards, joined for all of them to go on in the same way; the gradient is cut again."""
    out: Tensor = _Join.apply(x, axis, dim)
    return out


def copy_in(x: Tensor, axis: Axis) -> Tensor:
    """The same on every rank going in; the gradient is summed coming back."""
    out: Tensor = _CopyIn.apply(x, axis)
    return out


def reduce_out(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks going out; the gradient passes unchanged."""
    out: Tensor = _ReduceOut.apply(x, axis)
    return out


def sum_up(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks, each of which goes on in its own way: their gradients are summed too."""
    out: Tensor = _SumUp.apply(x, axis)
    return out
