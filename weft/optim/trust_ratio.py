"""LARS (You et al. 2017) and LAMB (You et al. 2020) for sharded weights: updates in proportion to the norm of a weight.

Only two sums of squares are communicated for each matrix. Vectors (biases and norms) have the ratio 1 and do not decay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from weft.comm.shards import local_of
from weft.job.schema import Optim
from weft.mesh import Mesh
from weft.optim.gradient_clip import zero_if_skipped
from weft.optim.replicas import sum_over_shards

Group = dict[str, Any]


class TrustRatioOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that scales the update of each matrix by a ratio of norms of the whole matrix."""

    found_inf: Tensor | None = None
    """A tensor that is 1 if this step is skipped."""
    mesh: Mesh | None = None
    """Ranks with the same shard of a weight take the sums of the first of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for param in params:
                self._update_moments(param, group)
            ratios: list[float | Tensor] = [1.0] * len(params)
            if params and params[0].dim() > 1:  # a group has matrices or vectors
                squares = [[_square(local_of(p)), _square(self._measured(p, group))] for p in params]
                sum_over_shards(self.mesh, squares, params)
                ratios = [self._ratio(w.sqrt().float(), u.sqrt().float(), group) for w, u in squares]
            for param, ratio in zip(params, ratios, strict=True):
                self._apply(param, ratio, group)

    def _update_moments(self, param: Tensor, group: Group) -> None:
        """Update what does not depend on the ratio."""

    @abstractmethod
    def _measured(self, param: Tensor, group: Group) -> Tensor:
        """This rank's shard of the tensor whose norm the ratio depends on."""

    @abstractmethod
    def _ratio(self, weight: Tensor, measured: Tensor, group: Group) -> Tensor:
        """The trust ratio of the norms of a weight and of what was measured."""

    @abstractmethod
    def _apply(self, param: Tensor, ratio: float | Tensor, group: Group) -> None:
        """Update a weight."""

    def _grad(self, param: Tensor) -> Tensor:
        """This rank's shard of the gradient."""
        assert param.grad is not None
        return zero_if_skipped(local_of(param.grad), self.found_inf)

    @property
    def _taken(self) -> float | Tensor:
        return 1.0 if self.found_inf is None else 1.0 - self.found_inf


class Lars(TrustRatioOptimizer):
    """SGD with momentum, with the gradient of a matrix scaled by η‖w‖ / (‖g‖ + decay · ‖w‖)."""

    def __init__(self, groups: Iterable[Group], lr: float, momentum: float, trust: float):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": 0.0})

    def _measured(self, param: Tensor, group: Group) -> Tensor:
        return self._grad(param)

    def _ratio(self, weight: Tensor, measured: Tensor, group: Group) -> Tensor:
        ratio = group["trust"] * weight / (measured + group["weight_decay"] * weight)
        return torch.where((weight > 0) & (measured > 0), ratio, 1.0)

    def _apply(self, param: Tensor, ratio: float | Tensor, group: Group) -> None:
        if not self.state[param]:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        weight, mean = local_of(param), local_of(self.state[param]["momentum_buffer"])
        update = self._grad(param).add(weight, alpha=group["weight_decay"]).mul_(ratio * self._taken)
        mean.mul_(1 - (1 - group["momentum"]) * self._taken).add_(update)
        weight.sub_(mean * (group["lr"] * self._taken))


class Lamb(TrustRatioOptimizer):
    """AdamW, with the update u of a matrix (decay included) scaled by ‖w‖ / ‖u‖."""

    def __init__(self, groups: Iterable[Group], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def _update_moments(self, param: Tensor, group: Group) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), device=param.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += self._taken
        grad, (beta1, beta2) = self._grad(param), group["betas"]
        local_of(state["exp_avg"]).lerp_(grad, (1 - beta1) * self._taken)
        local_of(state["exp_avg_sq"]).lerp_(grad.square(), (1 - beta2) * self._taken)

    def _measured(self, param: Tensor, group: Group) -> Tensor:
        """The update before scaling; computed twice in a step instead of stored."""
        state, steps = self.state[param], self.state[param]["step"].clamp(min=1).double()
        first, second = (1 - beta**steps for beta in group["betas"])
        update = local_of(state["exp_avg_sq"]).sqrt().div_(second.sqrt().float()).add_(group["eps"])
        torch.div(local_of(state["exp_avg"]), update, out=update)
        return update.div_(first.float()).add_(local_of(param), alpha=group["weight_decay"])

    def _ratio(self, weight: Tensor, measured: Tensor, group: Group) -> Tensor:
        return torch.where((weight > 0) & (measured > 0), weight / measured, 1.0)

    def _apply(self, param: Tensor, ratio: float | Tensor, group: Group) -> None:
        local_of(param).sub_(self._measured(param, group).mul_(ratio * (group["lr"] * self._taken)))


def _square(tensor: Tensor) -> Tensor:
    """The sum of the squares of a tensor; in fp64, so that the order in which ranks are summed does not matter."""
    return torch.linalg.vector_norm(tensor).double().square()


def build_lars(optim: Optim, groups: list[Group]) -> Lars:
    """LARS of a job's parameter groups."""
    return Lars(groups, optim.lr, optim.momentum, optim.trust)


def build_lamb(optim: Optim, groups: list[Group]) -> Lamb:
    """LAMB of a job's parameter groups."""
    return Lamb(groups, optim.lr, optim.betas, optim.eps)
