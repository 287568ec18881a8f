"""What Weft knows of FSDP2 that FSDP2 does not promise: each private name behind one small function."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from weft.comm.wait_counters import Meter


def reduce_now(module: nn.Module) -> None:
    """Reduce the gradients that FSDP2 holds whole, as its hooks would at the end of a backward pass."""
    for each in fsdp_states(module):
        for group in fsdp_groups(each):
            group.post_backward()
    fully_shard.state(module)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def see_waits(module: nn.Module, meter: Meter, axis: str, replicated: bool) -> None:
    """Let the meter see when an FSDP2 module waits: in gathers and scatters, and from a scatter to the sum that follows
    it over the replicas, after which FSDP2 calls a hook. On a GPU those run beside the stream that computes, which
    waits where FSDP2 takes what was gathered, and where it hands over gradients."""
    for group in fsdp_groups(fully_shard.state(module)):  # type: ignore[attr-defined]
        if meter.cuda:
            group.wait_for_unshard = _Seen(group.wait_for_unshard, meter, axis, "all_gather")
            group.post_backward = _Seen(group.post_backward, meter, axis, "reduce_scatter")
            continue
        group._all_gather_comm = _Seen(group._all_gather_comm, meter, axis, "all_gather")
        group._reduce_scatter_comm = _Seen(group._reduce_scatter_comm, meter, axis, "reduce_scatter")
        if replicated:
            group._reduce_scatter_comm.then = group
            group._all_reduce_hook = lambda summed: meter.leave()


class _Seen:
    """One of FSDP2's collectives, under the eyes of the meter."""

    def __init__(self, comm: Any, meter: Meter, axis: str, what: str):
        self.comm, self.meter, self.axis, self.what = comm, meter, axis, what
        self.allocate = getattr(comm, "allocate", None)
        self.then: Any = None
        """The group that sums over the replicas next, if any does."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self.meter.inside(self.axis, self.what):
            work = self.comm(*args, **options)
        if self.then is not None and self.then.all_reduce_grads:
            self.meter.enter("dp_replicate", "all_reduce")
        return work


def fsdp_states(module: nn.Module) -> list[Any]:
    """What FSDP2 keeps of a root and of every module below it."""
    return list(fully_shard.state(module)._state_ctx.all_states)  # type: ignore[attr-defined]


def fsdp_groups(state: Any) -> list[Any]:
    """An FSDP2 state's groups of parameters: one until torch 2.12, a list since."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []
