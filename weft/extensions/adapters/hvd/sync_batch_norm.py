"""Batch normalization with the statistics of all ranks' samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.extensions.adapters.hvd.differentiable import allreduce
from weft.extensions.adapters.hvd.reduce_ops import Sum
from weft.extensions.adapters.hvd.session import size


class SyncBatchNorm(nn.BatchNorm1d):
    """BatchNorm of any number of dimensions; ranks may have different numbers of samples. CPU tensors work too."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs at least 2 dimensions (batch, features), not {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if size() == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        dims = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count = torch.tensor([float(input.numel() // input.shape[1])], dtype=wide.dtype, device=input.device)
        totals = allreduce(torch.cat([wide.sum(dims), count]), op=Sum)
        samples = totals[-1].detach()
        mean = totals[:-1] / samples
        centered = wide - mean.view(shape)
        variance = allreduce(centered.square().sum(dims), op=Sum) / samples
        self._update_statistics(mean.detach(), variance.detach(), float(samples))
        normal = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _update_statistics(self, mean: Tensor, variance: Tensor, samples: float) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((variance * samples / max(samples - 1, 1)).to(self.running_var.dtype), momentum)
