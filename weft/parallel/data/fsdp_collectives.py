"""FSDP2's collectives with the counters of every axis: calls, bytes, waits, and the timeline of a timed step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from weft.comm.axis import Axis, native_all_gather, native_reduce_scatter
from weft.comm.trace_ranges import COMM
from weft.mesh import Mesh
from weft.parallel.data.fsdp_internals import all_reduces, meter_gpu_waits

Axes = dict[dist.ProcessGroup, Axis]


class Allocates:
    """What FSDP2 requires of a custom collective besides the call."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


def _metered(axis: Axis | None, what: str, tensor: Tensor, run: Callable[[], Any], async_op: bool) -> Any:
    """Run a collective with its counters. On a GPU it runs in a stream of FSDP2's, so the call itself does not wait."""
    if axis is None:
        return run()
    meter = axis.meter
    axis.count(what, tensor)
    if meter.cuda:
        with meter.range(f"{COMM} {axis.name} {what}"):
            if meter.timeline is None:
                return run()
            with meter.timeline.call(axis.name, what, waits=False):
                return run()
    if async_op:
        with meter.inside(axis.name, what):
            return meter.follow(run(), axis.name, what)
    with meter.blocking(axis.name, what):
        return run()


class CountedGather(Allocates):
    """Gathers weights as FSDP2 does by default, with counters."""

    def __init__(self, axes: Axes):
        self.axes = axes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        def gather() -> Any:
            return native_all_gather(output_tensor, input_tensor, group=group, async_op=async_op)

        return _metered(self.axes.get(group), "all_gather", input_tensor, gather, async_op)


class CountedScatter(Allocates):
    """Sums and shards gradients as FSDP2 does by default, with counters. `replicated` returns whether FSDP2 sums the
    shards over dp_replicate next; the meter counts that wait until FSDP2 calls summed()."""

    def __init__(self, axes: Axes, replicated: Callable[[], bool]):
        self.axes, self.replicated = axes, replicated

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        def scatter() -> Any:
            return native_reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)

        axis = self.axes.get(group)
        work: dist.Work | None = _metered(axis, "reduce_scatter", input_tensor, scatter, async_op)
        if axis is not None and self.replicated():
            axis.meter.enter("dp_replicate", "all_reduce")
        return work


def meter_collectives(module: nn.Module, mesh: Mesh, axis: str, replicated: bool) -> None:
    """Count the collectives of all FSDP2 modules. `axis` is the axis over which they are sharded; with `replicated`
    FSDP2 sums over dp_replicate too."""
    axes = {each.group: each for each in mesh.axes.values()}
    units: list[Any] = [m for m in module.modules() if isinstance(m, FSDPModule)]
    for unit in units:
        if mesh.meter.cuda:
            meter_gpu_waits(unit, mesh.meter, axis)
        unit.set_custom_all_gather(CountedGather(axes))
        by_host = replicated and not mesh.meter.cuda
        unit.set_custom_reduce_scatter(CountedScatter(axes, all_reduces(unit) if by_host else lambda: False))
        if by_host:
            unit.set_all_reduce_hook(lambda _: mesh.meter.leave())
