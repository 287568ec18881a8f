"""LARS (You et al. 2017) and LAMB (You et al. 2020) for sharded weights: updates in proportion to the norm of a weight.

Only two sums of squares are communicated for each matrix. Vectors (biases and norms) have the ratio 1 and do not decay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.comm import foreach_internals as foreach
from weft.comm.shards import local_of
from weft.extensions.optimizers.matrix_updates import batches, sum_over_shards
from weft.job.schema import Optim
from weft.mesh import Mesh
from weft.optim.gradient_clip import taken_share, zeroed_if_skipped

Group = dict[str, Any]


@dataclass(frozen=True)
class Weights:
    """Some weights of a group: this rank's shards, their gradients and states."""

    values: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Tensor]]
    scalars: list[list[Tensor]] = field(default_factory=list)
    """Numbers of each weight, by kind."""

    def state(self, key: str) -> list[Tensor]:
        """This rank's shards of one of the states."""
        return [local_of(state[key]) for state in self.states]

    def __getitem__(self, some: slice) -> Weights:
        scalars = [kind[some] for kind in self.scalars]
        return Weights(self.values[some], self.grads[some], self.states[some], scalars)


class TrustRatioOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that scales the update of each matrix by a ratio of norms of the whole matrix."""

    found_inf: Tensor | None = None
    """A tensor that is 1 if this step is skipped."""
    mesh: Mesh | None = None
    """Ranks with the same shard of a weight take the sums of the first of them."""
    state_names: tuple[str, ...]
    """Of the states with the shape of a weight."""
    counts_steps = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                self._update(params, group)

    def _update(self, params: list[Tensor], group: Group) -> None:
        for param in params:
            if not self.state[param]:
                if self.counts_steps:
                    self.state[param]["step"] = torch.zeros((), device=param.device)
                self.state[param] |= {name: torch.zeros_like(param) for name in self.state_names}
        weights = Weights(
            [local_of(p) for p in params], zeroed_if_skipped(params, self.found_inf), [self.state[p] for p in params]
        )
        taken = taken_share(self.found_inf, weights.values[0].device)
        parts = batches([w.numel() for w in weights.values])
        self._update_moments(weights, group, taken)
        ratios = taken.expand(len(params))
        if params[0].dim() > 1:  # a group has matrices or vectors
            measured = torch.cat([foreach.sums_of_squares(self._measured(weights[part], group)) for part in parts])
            # in fp64, so that the order in which ranks are summed does not matter
            squares = torch.stack([foreach.sums_of_squares(weights.values), measured], 1).flatten().unbind()
            pairs = [list(squares[first : first + 2]) for first in range(0, len(squares), 2)]
            sum_over_shards(self.mesh, pairs, params)
            found = torch.stack(squares).sqrt().float()
            ratios = self._ratio(found[::2], found[1::2], group) * taken
        for part in parts:
            self._apply(weights[part], list(ratios[part].unbind()), group, taken)

    def _update_moments(self, weights: Weights, group: Group, taken: Tensor) -> None:
        """Update what does not depend on the ratio, and add the scalars of _measured(). `taken` is 0 if the step is
        skipped."""

    @abstractmethod
    def _measured(self, weights: Weights, group: Group) -> list[Tensor]:
        """This rank's shards of the tensors whose norms the ratios depend on."""

    @abstractmethod
    def _ratio(self, weight: Tensor, measured: Tensor, group: Group) -> Tensor:
        """The trust ratios of the norms of weights and of what was measured."""

    @abstractmethod
    def _apply(self, weights: Weights, ratios: list[Tensor], group: Group, taken: Tensor) -> None:
        """Update some weights. Ratios are 0 if the step is skipped."""


class Lars(TrustRatioOptimizer):
    """SGD with momentum, with the gradient of a matrix scaled by η‖w‖ / (‖g‖ + decay · ‖w‖)."""

    state_names = ("momentum_buffer",)

    def __init__(self, groups: Iterable[Group], lr: float, momentum: float, trust: float):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": 0.0})

    def _measured(self, weights: Weights, group: Group) -> list[Tensor]:
        return weights.grads

    def _ratio(self, weight: Tensor, measured: Tensor, group: Group) -> Tensor:
        ratio = group["trust"] * weight / (measured + group["weight_decay"] * weight)
        return torch.where((weight > 0) & (measured > 0), ratio, 1.0)

    def _apply(self, weights: Weights, ratios: list[Tensor], group: Group, taken: Tensor) -> None:
        means = weights.state("momentum_buffer")
        updates = foreach.foreach_add_scaled(weights.grads, weights.values, group["weight_decay"])
        foreach.foreach_mul_(updates, ratios)
        foreach.foreach_mul_(means, 1 - (1 - group["momentum"]) * taken)
        foreach.foreach_add_scaled_(means, updates)
        del updates
        foreach.foreach_add_scaled_(weights.values, foreach.foreach_mul(means, taken), -group["lr"])


class Lamb(TrustRatioOptimizer):
    """AdamW, with the update u of a matrix (decay included) scaled by ‖w‖ / ‖u‖."""

    state_names, counts_steps = ("exp_avg", "exp_avg_sq"), True

    def __init__(self, groups: Iterable[Group], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def _update_moments(self, weights: Weights, group: Group, taken: Tensor) -> None:
        beta1, beta2 = group["betas"]
        foreach.foreach_add_(weights.state("step"), taken)
        foreach.foreach_mul_(weights.state("exp_avg"), 1 - (1 - beta1) * taken)
        foreach.foreach_add_scaled_(weights.state("exp_avg"), weights.grads, 1 - beta1)
        foreach.foreach_mul_(weights.state("exp_avg_sq"), 1 - (1 - beta2) * taken)
        foreach.foreach_add_squares_(weights.state("exp_avg_sq"), weights.grads, 1 - beta2)
        steps = torch.stack(weights.state("step")).clamp(min=1).double()
        corrections = 1 / (1 - beta1**steps), (1 - beta2**steps).rsqrt()
        weights.scalars.extend(list(each.float().unbind()) for each in corrections)

    def _measured(self, weights: Weights, group: Group) -> list[Tensor]:
        """The updates before scaling; computed twice in a step instead of stored."""
        first, second = weights.scalars
        updates = foreach.foreach_sqrt(weights.state("exp_avg_sq"))
        foreach.foreach_mul_(updates, second)
        foreach.foreach_reciprocal_(updates, group["eps"])
        foreach.foreach_mul_(updates, weights.state("exp_avg"))
        foreach.foreach_mul_(updates, first)
        foreach.foreach_add_scaled_(updates, weights.values, group["weight_decay"])
        return updates

    def _ratio(self, weight: Tensor, measured: Tensor, group: Group) -> Tensor:
        return torch.where((weight > 0) & (measured > 0), weight / measured, 1.0)

    def _apply(self, weights: Weights, ratios: list[Tensor], group: Group, taken: Tensor) -> None:
        updates = self._measured(weights, group)
        foreach.foreach_mul_(updates, ratios)
        foreach.foreach_add_scaled_(weights.values, updates, -group["lr"])


def build_lars(optim: Optim, groups: list[Group]) -> Lars:
    """LARS of a job's parameter groups."""
    return Lars(groups, optim.lr, optim.momentum, optim.trust)


def build_lamb(optim: Optim, groups: list[Group]) -> Lamb:
    """LAMB of a job's parameter groups."""
    return Lamb(groups, optim.lr, optim.betas, optim.eps)
