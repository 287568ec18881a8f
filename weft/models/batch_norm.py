"""Batch norm with the statistics of all replicas: the same run as one process, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.axis import Axis
from weft.job.errors import JobError


class GlobalBatchNorm(nn.Module):
    """Batch norm of any number of dims, with the names and buffers of torch's. On one GPU it is torch's own; one CPU
    rank computes as several do, with sums in float64, so that layouts differ by as little as possible."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, of: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        super().__init__()
        self.eps, self.momentum = of.eps, of.momentum
        self.register_parameter("weight", of.weight)
        self.register_parameter("bias", of.bias)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(of, name))
        self.train(of.training)
        self.axes: Sequence[Axis] = ()
        """Axes over which statistics are summed."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        if not self.axes:
            refuse_one_value(self, (x,))
        if not self.training or (x.is_cuda and not self.axes):
            of_batch = self.training or self.running_mean is None
            step = self._step() if self.training else 0.0
            return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, of_batch, step, self.eps)
        y, mean, var, count = _Normalise.apply(x, weight, bias, self.eps, self.axes)
        self._track(mean, var, count)
        out: Tensor = y
        return out

    def _step(self) -> float:
        """Count the batch, and return the weight of its statistics in the running ones."""
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked += 1
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        if self.running_mean is not None and self.running_var is not None:
            step = self._step()
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), step)
            unbiased = var * (count / (count - 1).clamp(min=1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), step)


class _Normalise(torch.autograd.Function):
    """(x - mean) / √(var + eps) · weight + bias with the mean and variance over all ranks of some axes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axes: Sequence[Axis]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims, shape = [d for d in range(x.dim()) if d != 1], [1, -1, *[1] * (x.dim() - 2)]
        wide = x.float()
        sums = torch.cat(
            [wide.sum(dims, dtype=torch.float64), wide.new_tensor([x.numel() // x.shape[1]], dtype=torch.float64)]
        )
        sums = _summed(sums, axes)
        count = sums[-1]
        mean = (sums[:-1] / count).float()
        centred = wide - mean.view(shape)  # the variance of centred values does not cancel
        var = (_summed(centred.square().sum(dims, dtype=torch.float64), axes) / count).float()
        inverse = torch.rsqrt(var + eps)
        y = centred.mul_((inverse if weight is None else inverse * weight).view(shape))
        if bias is not None:
            y.add_(bias.view(shape))
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.axes, ctx.dims, ctx.shape, ctx.has_bias = axes, dims, shape, bias is not None
        ctx.mark_non_differentiable(mean, var, count)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        dims, shape = ctx.dims, ctx.shape
        dy = grads[0].float()
        scaled = (x.float() - mean.view(shape)) * inverse.view(shape)
        sums = torch.cat([dy.sum(dims, dtype=torch.float64), (dy * scaled).sum(dims, dtype=torch.float64)])
        by_bias, by_weight = sums.float().chunk(2)
        total = _summed(sums, ctx.axes) / count
        mean_dy, mean_scaled = total.float().chunk(2)
        dx = torch.addcmul(dy - mean_dy.view(shape), scaled, mean_scaled.view(shape), value=-1)
        dx.mul_((inverse if weight is None else inverse * weight).view(shape))
        return (
            dx.to(x.dtype), by_weight if weight is not None else None, by_bias if ctx.has_bias else None, None, None
        )  # fmt: skip


def _summed(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        x = axis.all_reduce(x)
    return x


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def refuse_one_value(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Refuse to train a batch norm on one value per channel: it is its own mean."""
    if norm.training and inputs[0].numel() == inputs[0].shape[1]:
        raise JobError(
            "a batch norm is given one value per channel, whose variance is 0: the microbatch has one sample; "
            "a larger train.microbatch, model.batch_norm=all on several ranks, or fewer parallel.microbatches in a "
            "pipeline, would work"
        )


def use_rank_batch_norms(module: nn.Module) -> nn.Module:
    """Let torch's batch norms refuse what they cannot train on with a sentence; their statistics are of each rank."""
    for part in module.modules():
        if isinstance(part, BATCH_NORMS):
            part.register_forward_pre_hook(refuse_one_value)
    return module


def use_global_batch_norms(module: nn.Module) -> nn.Module:
    """Replace torch's batch norms by ones that can use the statistics of all replicas; names do not change."""
    if isinstance(module, BATCH_NORMS):
        return GlobalBatchNorm(module)
    for name, child in list(module.named_children()):
        if (made := use_global_batch_norms(child)) is not child:
            setattr(module, name, made)
    return module


def connect_batch_norms(module: nn.Module, axes: Sequence[Axis]) -> None:
    """Let the batch norms of a module sum their statistics over these axes."""
    for part in module.modules():
        if isinstance(part, GlobalBatchNorm):
            part.axes = axes
