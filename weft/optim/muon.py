"""Muon for weights that are cut: the momentum stays cut, the update is made from the whole matrix.

torch's own would run Newton–Schulz on DTensors, whose products are split differently in each layout; its bf16 rounding
then makes each layout another run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weft.comm.shards import local_of, shard_of
from weft.optim.clip import passed
from weft.planner.engine_constants import MUON_ITERATIONS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose slope at zero is steepest (Jordan et al. 2024)."""
TINY = 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024), with AdamW's update size (Liu et al. 2025, §2.2)."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float, weight_decay: float):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    found_inf: Tensor | None = None
    """1 on the device where this step must change nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        taken: float | Tensor = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        for group in self.param_groups:
            lr, momentum = group["lr"] * taken, group["momentum"]
            for param in (p for p in group["params"] if p.grad is not None):
                if "momentum_buffer" not in self.state[param]:
                    self.state[param]["momentum_buffer"] = torch.zeros_like(param)
                weight, grad = local_of(param), passed(local_of(param.grad), self.found_inf)
                mean = local_of(self.state[param]["momentum_buffer"])
                mean.lerp_(grad, (1 - momentum) * taken)
                shard = shard_of(param)
                wanted = grad.lerp(mean, momentum)
                if param.dim() == 3 and shard.size[1:] == tuple(shard.shape[1:]):  # whole matrices of some experts
                    update = orthogonal(wanted)
                else:
                    update = orthogonal(shard.whole(wanted))[shard.box]
                weight.mul_(1 - lr * group["weight_decay"])
                size = lr * 0.2 * math.sqrt(max(param.shape[-2:]))
                weight.sub_(update * size)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix whose singular values are all 1, by Newton–Schulz: in bf16 where that is fast.

    A stack [experts, out, in] is one matrix after the other.
    """
    if matrix.dim() == 3:
        return torch.stack([orthogonal(each) for each in matrix]) if len(matrix) else matrix
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=TINY)
    a, b, c = COEFFICIENTS
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)
