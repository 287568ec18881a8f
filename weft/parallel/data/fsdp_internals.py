"""Private names of FSDP2, each behind one small function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map

from weft.comm.meter import Meter


@dataclass(frozen=True)
class ShardedParam:
    """A parameter of an FSDP2 module."""

    param: Tensor
    """This rank's shard, as the module holds it."""
    shape: torch.Size
    """Before it was sharded."""
    dim: int
    """The dim along which it is sharded."""


class _NotAView(torch.autograd.Function):
    """The same values in the same memory, as a tensor that autograd does not know as a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _outputs_without_views(module: nn.Module, inputs: object, outputs: Any) -> Any:
    """A forward hook for units that will be sharded: an operation in place on a view, such as `y += x` on the output of
    an nn.Linear, would drop the hook with which FSDP2 gathers the weights of the backward pass."""
    if not torch.is_grad_enabled():
        return outputs
    return tree_map(
        lambda x: _NotAView.apply(x) if isinstance(x, Tensor) and x.requires_grad and x._base is not None else x,
        outputs,
    )


def fsdp_states(module: nn.Module) -> list[Any]:
    """The FSDP2 states of a root module and of every module below it."""
    return list(fully_shard.state(module)._state_ctx.all_states)  # type: ignore[attr-defined]


def fsdp_groups(state: Any) -> list[Any]:
    """The parameter groups of an FSDP2 state: one until torch 2.12, a list since."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _groups_of(unit: nn.Module) -> list[Any]:
    return fsdp_groups(fully_shard.state(unit))  # type: ignore[attr-defined]


def sharded_params(unit: nn.Module) -> list[tuple[dist.ProcessGroup, list[ShardedParam]]]:
    """Of each parameter group of an FSDP2 module: the ranks over which it is sharded, and its parameters."""
    return [
        (
            group.mesh_info.shard_process_group,
            [ShardedParam(p.sharded_param, p._orig_size, p.fsdp_placement.dim) for p in group.fsdp_params],
        )
        for group in _groups_of(unit)
    ]


def shard_unit(unit: nn.Module, **settings: Any) -> None:
    """fully_shard() of a unit whose outputs may be changed in place, and which a forward pass may leave out."""
    unit.register_forward_hook(_outputs_without_views)
    fully_shard(unit, **settings)
    _allow_unused(unit)


def _allow_unused(unit: nn.Module) -> None:
    """Let a backward pass without a reduction leave out weights that no forward pass has used: FSDP2 would read their
    gathered copies, which do not exist."""
    for group in _groups_of(unit):
        for param in group.fsdp_params:
            param.to_accumulated_grad_if_needed = partial(
                _accumulate_if_gathered, param, param.to_accumulated_grad_if_needed
            )


def _accumulate_if_gathered(param: Any, accumulate: Callable[[], None]) -> None:
    if hasattr(param, "_unsharded_param"):
        accumulate()


def reduce_now(module: nn.Module) -> None:
    """Reduce the unsharded gradients, as FSDP2's hooks do at the end of a backward pass."""
    for state in fsdp_states(module):
        for group in fsdp_groups(state):
            group.post_backward()
    fully_shard.state(module)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def accumulate_gradients(module: nn.Module) -> None:
    """Add gradients that were assigned to unsharded parameters to FSDP2's fp32 sums."""
    for state in fsdp_states(module):
        for group in fsdp_groups(state):
            for param in group.fsdp_params:
                param.accumulate_unsharded_grad_if_needed()
                param.to_accumulated_grad_if_needed()


def all_reduces(unit: nn.Module) -> Callable[[], bool]:
    """Whether an FSDP2 module sums its sharded gradients over the replicas at the end of this backward pass."""
    groups = _groups_of(unit)
    return lambda: any(group.all_reduce_grads for group in groups)


def meter_gpu_waits(unit: nn.Module, meter: Meter, axis: str) -> None:
    """Count the waits of the compute stream: for gathered weights, and where gradients are reduced. Collectives run in
    FSDP2's own streams."""

    def metered(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with meter.inside(axis, what):
                return function(*args, **options)

        return call

    for group in _groups_of(unit):
        group.wait_for_unshard = metered(group.wait_for_unshard, "all_gather")
        group.post_backward = metered(group.post_backward, "reduce_scatter")
