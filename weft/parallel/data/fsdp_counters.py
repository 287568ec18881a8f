"""FSDP2's collectives, counted on the axes they run along, as all others are."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from weft.comm.axis import Axis
from weft.mesh import Mesh

Gather: Any = DefaultAllGather
Scatter: Any = DefaultReduceScatter
Axes = dict[dist.ProcessGroup, Axis]


class CountedGather(Gather):
    """Gathers weights as FSDP2 does by itself."""

    def __init__(self, axes: Axes):
        self.axes = axes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        def gather() -> Any:
            return super(CountedGather, self).__call__(output_tensor, input_tensor, group, async_op)

        axis = self.axes.get(group)
        if axis is None:
            return gather()
        axis.count("all_gather", input_tensor)
        if axis.spans is None:
            return gather()
        if async_op:
            return axis.spans.follow(gather())
        with axis.spans.call(waits=not axis.spans.cuda):
            return gather()


class CountedScatter(Scatter):
    """Sums and cuts gradients as FSDP2 does by itself."""

    def __init__(self, axes: Axes):
        self.axes = axes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work:
        def scatter() -> Any:
            return super(CountedScatter, self).__call__(output_tensor, input_tensor, group, op, async_op)

        axis = self.axes.get(group)
        if axis is None:
            return scatter()
        axis.count("reduce_scatter", input_tensor)
        if axis.spans is None:
            return scatter()
        with axis.spans.call(waits=not axis.spans.cuda):
            return scatter()


def count_shards(module: nn.Module, mesh: Mesh) -> None:
    """Let the axes see what FSDP2 gathers and scatters; what it adds up over dp_replicate, it does by itself."""
    axes = {axis.group: axis for axis in mesh.axes.values()}
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_custom_all_gather(CountedGather(axes))
            each.set_custom_reduce_scatter(CountedScatter(axes))
