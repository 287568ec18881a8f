"""An optimizer and a learning-rate schedule of a user's own: Lion (Chen et al. 2023), and 1 / √step."""

from typing import Any

import torch

from weft.job.optim import LR_SCHEDULES, OPTIMIZERS, LrSchedule, Optim, Optimizer


class Lion(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"]).add_(p.grad.lerp(mean, b1).sign_(), alpha=-lr)
                mean.lerp_(p.grad, 1 - b2)


def build(optim: Optim, groups: list[dict[str, Any]]) -> Lion:
    """The `optim` section of the job, and parameter groups as torch takes them."""
    return Lion(groups, {"lr": optim.lr, "betas": optim.betas})


def inverse_sqrt(optim: Optim, step: int, warmup: int, steps: int) -> float:
    """Share of optim.lr after the warm-up."""
    return float((max(1, warmup) / step) ** 0.5)


OPTIMIZERS.register(Optimizer("lion", "Lion.", f"{__name__}:build", state=lambda optim, weight: weight.held))
LR_SCHEDULES.register(LrSchedule("inverse-sqrt", "lr / √step.", inverse_sqrt))
