"""Whole tensors loaded into spread weights and optimizer states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from weft.job.errors import JobError


def spread_as(value: Tensor, target: Tensor) -> Tensor:
    """A whole tensor, spread as another one of the same shape is. Call it on every rank."""
    if not isinstance(target, DTensor):
        return value.to(target.device)
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)


def load_whole(module: nn.Module, weights: dict[str, Tensor], strict: bool = True) -> None:
    """Copy whole weights and buffers into a module's, whatever its layout."""
    targets = module.state_dict()
    missing = sorted(targets.keys() ^ weights.keys())
    if strict and missing:
        raise JobError(
            f"the checkpoint and the module differ in {', '.join(missing[:3])}; strict=False would load the rest"
        )
    with torch.no_grad():
        for name in targets.keys() & weights.keys() if not strict else sorted(targets):
            if isinstance(targets[name], Tensor):
                targets[name].copy_(spread_as(weights[name], targets[name]))


def spread_state(optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state_dict with whole tensors, as one of its spread weights."""
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def spread(value: Any, param: Tensor) -> Any:
        whole_size = isinstance(value, Tensor) and value.shape == param.shape
        return spread_as(value, param) if whole_size else value

    state = {i: {k: spread(v, params[i]) for k, v in values.items()} for i, values in whole["state"].items()}
    return {**whole, "state": state}
