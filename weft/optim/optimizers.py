"""The optimizers of the core: AdamW and SGD. A new one is an entry in an extension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.job.optim import OPTIMIZERS, Optim, Optimizer

if TYPE_CHECKING:
    import torch


def sgd(optim: Optim, groups: list[dict[str, Any]]) -> torch.optim.SGD:
    """torch's SGD of a job's parameter groups."""
    import torch

    return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=True)


OPTIMIZERS.register(
    Optimizer(
        "adamw", "AdamW (Loshchilov & Hutter 2019), fused.", "weft.optim.adamw:build",
        state=lambda optim, weight: 2 * weight.held + 1,  # two moments, and the count of steps
        coded_in_kernel=True,
    )
)  # fmt: skip
OPTIMIZERS.register(
    Optimizer(
        "sgd", "SGD with momentum.", "weft.optim.optimizers:sgd",
        state=lambda optim, weight: weight.held if optim.momentum else 0, update_time=0.7,
    )
)  # fmt: skip
