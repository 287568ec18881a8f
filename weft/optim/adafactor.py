"""Adafactor (Shazeer & Stern 2018) for sharded weights: only sums of rows, columns and scalars are communicated.

The same algorithm as torch.optim.Adafactor, whose in-place norms DTensor does not support.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weft.comm.shards import LocalShard, local_of, shard_of
from weft.job.schema import Optim
from weft.mesh import Mesh
from weft.optim.gradient_clip import zero_if_skipped
from weft.optim.replicas import sum_over_shards, take_from_first

BETA2_DECAY = -0.8
MIN_PARAMETER_SCALE = 1e-3
"""ε₂: lower bound of a parameter's scale."""


class Adafactor(torch.optim.Optimizer):
    """Second moments of a matrix as the product of row and column means."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    found_inf: Tensor | None = None
    """A tensor that is 1 if this step is skipped."""
    mesh: Mesh | None = None
    """Ranks with the same shard of a weight take the sums of the first of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        taken: float | Tensor = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        for group in self.param_groups:
            lr = group["lr"]
            params = [p for p in group["params"] if p.grad is not None]
            shards = [shard_of(p) for p in params]
            sums = [self._sums(p, shard) for p, shard in zip(params, shards, strict=True)]
            sum_over_shards(self.mesh, sums, params)
            for param, shard, found in zip(params, shards, sums, strict=True):
                self._update_moments(param, shard, found)
            means = [self._mean(p) for p in params]
            take_from_first(self.mesh, means, params)
            work = list(zip(params, shards, means, strict=True))
            squares = [[self._direction(p, shard, mean).square().sum()] for p, shard, mean in work]
            sum_over_shards(self.mesh, squares, params)
            for (param, shard, mean), found, [square] in zip(work, sums, squares, strict=True):
                count = math.prod(shard.shape)
                rate_limit = self.state[param]["step"].double() ** -0.5
                scale = (
                    (found[0] / count).sqrt().clamp(min=MIN_PARAMETER_SCALE) * rate_limit.clamp(max=lr).float() * taken
                )
                clipped = (square / count).sqrt().clamp(min=1.0)
                weight = local_of(param)
                weight.mul_(1 - lr * group["weight_decay"] * taken)
                weight.sub_(self._direction(param, shard, mean) * (scale / clipped))

    def _sums(self, param: Tensor, shard: LocalShard) -> list[Tensor]:
        """This rank's part of the sums of squares of the weight and of the gradient's rows and columns."""
        out = [local_of(param).square().sum()]
        if param.dim() > 1:
            square = self._grad(param).square()
            for dim in (-1, -2):
                whole = square.new_zeros(_without(shard.shape, dim))
                whole[_without_box(shard.box, dim)] = square.sum(dim, keepdim=True)
                out.append(whole)
        return out

    def _update_moments(self, param: Tensor, shard: LocalShard, sums: list[Tensor]) -> None:
        """Update the second moments."""
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), device=param.device)
            if param.dim() > 1:
                state["row_var"], state["col_var"] = torch.zeros_like(sums[1]), torch.zeros_like(sums[2])
            else:
                state["variance"] = torch.zeros_like(param)
        taken: float | Tensor = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        state["step"] += taken
        share = (state["step"].double().clamp(min=1) ** BETA2_DECAY * taken).float()
        if param.dim() > 1:
            state["row_var"].lerp_(sums[1] / shard.shape[-1], share)
            state["col_var"].lerp_(sums[2] / shard.shape[-2], share)
        else:
            local_of(state["variance"]).lerp_(self._grad(param).square(), share)

    def _mean(self, param: Tensor) -> list[Tensor]:
        """The mean of a matrix's row means; none of a vector."""
        return [self.state[param]["row_var"].mean(-2, keepdim=True)] if param.dim() > 1 else []

    def _grad(self, param: Tensor) -> Tensor:
        """This rank's shard of the gradient."""
        assert param.grad is not None
        return zero_if_skipped(local_of(param.grad), self.found_inf)

    def _direction(self, param: Tensor, shard: LocalShard, mean: list[Tensor]) -> Tensor:
        """The normalised gradient on this rank; computed twice per step instead of stored."""
        state, eps = self.state[param], torch.finfo(param.dtype).eps
        if param.dim() > 1:
            row = (state["row_var"] / mean[0].clamp(min=eps))[_without_box(shard.box, -1)]
            variance = row * state["col_var"][_without_box(shard.box, -2)]
        else:
            variance = local_of(state["variance"])
        return self._grad(param) * variance.clamp(min=eps * eps).rsqrt()


def build(optim: Optim, groups: list[dict[str, Any]]) -> Adafactor:
    """The optimizer of a job's parameter groups."""
    return Adafactor(groups, optim.lr)


def _without(shape: torch.Size, dim: int) -> list[int]:
    out = list(shape)
    out[dim] = 1
    return out


def _without_box(box: tuple[slice, ...], dim: int) -> tuple[slice, ...]:
    out = list(box)
    out[dim] = slice(0, 1)
    return tuple(out)
