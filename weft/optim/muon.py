"""Muon for sharded weights: the momentum is sharded, the update is computed from the whole matrix.

torch's Muon runs Newton–Schulz on DTensors, whose products are split differently in each layout; with bf16 rounding the
layouts would then give different runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weft.comm.shards import local_of, shard_of
from weft.optim.clip import zero_if_skipped
from weft.planner.engine_constants import MUON_ITERATIONS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose slope at zero is steepest (Jordan et al. 2024)."""
MIN_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024), with AdamW's update size (Liu et al. 2025, §2.2)."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float, weight_decay: float):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    found_inf: Tensor | None = None
    """A tensor that is 1 if this step is skipped."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        taken: float | Tensor = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        for group in self.param_groups:
            lr, momentum = group["lr"] * taken, group["momentum"]
            for param in (p for p in group["params"] if p.grad is not None):
                if "momentum_buffer" not in self.state[param]:
                    self.state[param]["momentum_buffer"] = torch.zeros_like(param)
                weight, grad = local_of(param), zero_if_skipped(local_of(param.grad), self.found_inf)
                mean = local_of(self.state[param]["momentum_buffer"])
                mean.lerp_(grad, (1 - momentum) * taken)
                shard = shard_of(param)
                wanted = grad.lerp(mean, momentum)
                # this rank may have whole matrices of some experts
                if param.dim() == 3 and shard.size[1:] == tuple(shard.shape[1:]):
                    update = orthogonal(wanted)
                else:
                    update = orthogonal(shard.whole(wanted))[shard.box]
                weight.mul_(1 - lr * group["weight_decay"])
                size = lr * 0.2 * math.sqrt(max(param.shape[-2:]))
                weight.sub_(update * size)


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximately the nearest matrix with singular values of 1, by Newton–Schulz, in bf16 on GPUs.

    A stack [experts, out, in] is processed matrix by matrix.
    """
    if matrix.dim() == 3:
        return torch.stack([orthogonal(each) for each in matrix]) if len(matrix) else matrix
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=MIN_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)
