"""Parameters and optimizer states that become those of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.extensions.adapters.hvd.objects import broadcast_object
from weft.extensions.adapters.hvd.operations import broadcast_async_, synchronize
from weft.extensions.adapters.hvd.process_sets import ProcessSet, global_process_set
from weft.extensions.adapters.hvd.session import rank


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite a state dict, or a list of parameters with or without names, by those of a rank."""
    if isinstance(params, Mapping):
        items = sorted((str(name), value) for name, value in params.items() if isinstance(value, Tensor))
    elif isinstance(params, Iterable) and not isinstance(params, Tensor | str):
        items = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ValueError(f"broadcast_parameters takes a dict or a list of parameters, not {type(params).__name__}")
    handles = [broadcast_async_(value, root_rank, name, process_set) for name, value in items]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int = 0, model: Any = None, process_set: ProcessSet = global_process_set
) -> None:
    """Make the options and the state of an optimizer those of a rank, whether or not each has taken a step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of torch.optim.LBFGS cannot be broadcast; other optimizers' states can")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not optimizer.state:  # as Horovod does: scripts read these gradients
        for param in params:
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
    mine = rank() == root_rank
    description = broadcast_object(_description(optimizer, params) if mine else None, root_rank, None, process_set)
    if len(description["groups"]) != len(optimizer.param_groups) or description["params"] != len(params):
        raise ValueError(
            f"the optimizer has {len(optimizer.param_groups)} groups with {len(params)} parameters, that of rank "
            f"{root_rank} {len(description['groups'])} with {description['params']}"
        )
    if not mine:
        for group, options in zip(optimizer.param_groups, description["groups"], strict=True):
            group.update(options)
        optimizer.state.clear()
        for index, values in description["state"].items():
            optimizer.state[params[index]] = {key: _received(kind, params[index]) for key, kind in values.items()}
    handles = [
        broadcast_async_(value, root_rank, None, process_set)
        for index in description["state"]
        for value in optimizer.state[params[index]].values()
        if isinstance(value, Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def _description(optimizer: Optimizer, params: list[Tensor]) -> dict[str, Any]:
    """Options and state of an optimizer, with the kinds of its tensors instead of their values."""
    return {
        "params": len(params),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "state": {
            i: {key: _kind(value, param) for key, value in optimizer.state[param].items()}
            for i, param in enumerate(params)
            if param in optimizer.state
        },
    }


def _kind(value: Any, param: Tensor) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.device == param.device)
    return (value,)


def _received(kind: tuple[Any, ...], param: Tensor) -> Any:
    """A tensor of that kind, to be overwritten, or the value."""
    if len(kind) == 1:
        return kind[0]
    shape, dtype, beside = kind
    return torch.zeros(shape, dtype=dtype, device=param.device if beside else "cpu")
