"""One axis of the mesh: its group, this rank's place on it, and its collectives, each counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both and warns of the old names
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Axis:
    """A named group of ranks. `calls` and `bytes` count what this rank asked for, by collective."""

    name: str
    group: dist.ProcessGroup
    size: int
    rank: int
    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def count(self, what: str, tensor: Tensor) -> None:
        """Note a message that this rank hands over."""
        self.calls[what] += 1
        self.bytes[what] += tensor.numel() * tensor.element_size()

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce in place and return the tensor."""
        self.count("all_reduce", tensor)
        dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> dist.Work:
        """Begin a sum in place; wait() on what is returned."""
        self.count("all_reduce", tensor)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return work

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The pieces of all ranks, joined along dim."""
        tensor = tensor.contiguous()
        self.count("all_gather", tensor)
        out = tensor.new_empty((self.size, *tensor.shape))
        _ALL_GATHER(out.view(-1), tensor.view(-1), group=self.group)
        return _join(out, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """The sum over all ranks, of which each keeps its piece along dim."""
        pieces = torch.stack(tensor.chunk(self.size, dim))
        self.count("reduce_scatter", pieces)
        out = torch.empty_like(pieces[0])
        _REDUCE_SCATTER(out.view(-1), pieces.view(-1), group=self.group)
        return out

    def narrow(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's piece along dim."""
        return tensor.chunk(self.size, dim)[self.rank]


def _join(stacked: Tensor, dim: int) -> Tensor:
    """[ranks, ...] to one tensor, joined along dim; for dim 0 without a copy."""
    if dim == 0:
        return stacked.flatten(0, 1)
    return stacked.movedim(0, dim).flatten(dim, dim + 1)
