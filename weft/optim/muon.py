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
from weft.job.schema import Optim
from weft.mesh import Mesh
from weft.optim.gradient_clip import zero_if_skipped
from weft.optim.replicas import Source
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

    mesh: Mesh | None = None
    """Ranks with the same shard of a weight take turns: one computes an update and sends it to the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            sources = [Source.of(self.mesh, param, index) for index, param in enumerate(params, group.get("first", 0))]
            at_once = max((source.ranks for source in sources), default=1)  # each rank computes one of these
            for first in range(0, len(params), at_once):
                work = list(zip(params, sources, strict=True))[first : first + at_once]
                updates = [self._update(param, source, group["momentum"]) for param, source in work]
                for (param, source), update in zip(work, updates, strict=True):
                    self._apply(param, source.send(update), group)

    def _update(self, param: Tensor, source: Source, momentum: float) -> Tensor:
        """This rank's shard of the orthogonalised momentum; without values where another rank computes it."""
        if "momentum_buffer" not in self.state[param]:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        grad = zero_if_skipped(local_of(param.grad), self.found_inf)  # type: ignore[arg-type]
        mean = local_of(self.state[param]["momentum_buffer"])
        mean.lerp_(grad, (1 - momentum) * self._taken)
        if not source.here:
            return torch.empty_like(mean)
        shard = shard_of(param)
        wanted = grad.lerp(mean, momentum)
        # this rank may have whole matrices of some experts
        if param.dim() == 3 and shard.size[1:] == tuple(shard.shape[1:]):
            return orthogonal(wanted)
        return orthogonal(shard.whole(wanted))[shard.box].contiguous()

    def _apply(self, param: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        lr = group["lr"] * self._taken
        weight = local_of(param)
        weight.mul_(1 - lr * group["weight_decay"])
        weight.sub_(update * (lr * 0.2 * math.sqrt(max(param.shape[-2:]))))

    @property
    def _taken(self) -> float | Tensor:
        return 1.0 if self.found_inf is None else 1.0 - self.found_inf


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


def build(optim: Optim, groups: list[dict[str, Any]]) -> Muon:
    """The optimizer of a job's parameter groups."""
    return Muon(groups, optim.lr, optim.momentum, optim.weight_decay)
