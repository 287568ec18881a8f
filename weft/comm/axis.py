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
class Exchange:
    """Messages on their way."""

    works: list[dist.Work]
    sent: list[Tensor]
    arrived: list[Tensor]
    wanted: list[Tensor]
    """Where they are wanted, if that is not where they arrive."""

    def wait(self) -> list[Tensor]:
        """What was received, in the order in which it was asked for."""
        for work in self.works:
            work.wait()
        for arrived, wanted in zip(self.arrived, self.wanted, strict=True):
            if arrived is not wanted:
                wanted.copy_(arrived)
        return self.wanted


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

    def all_to_all(self, pieces: Tensor, peers: range) -> Tensor:
        """Hand pieces[i] to the i-th of `peers`, of which this rank is one, and get its piece for us: [peers, ...]."""
        pieces = pieces.contiguous()
        self.calls["all_to_all"] += 1
        self.bytes["all_to_all"] += pieces[1:].numel() * pieces.element_size()  # its own piece stays
        splits = [int(r in peers) for r in range(self.size)]
        out = torch.empty_like(pieces)
        dist.all_to_all_single(out, pieces, splits, splits, group=self.group)
        return out

    def start_exchange(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Exchange:
        """Begin to send to and receive from some ranks of the axis; messages between two ranks keep their order."""
        # Gloo cannot send from GPU memory: there messages pass through the host
        host = any(t.is_cuda for _, t in (*sends, *receives)) and dist.get_backend(self.group) == "gloo"
        outgoing = [(to, (t.cpu() if host else t).contiguous()) for to, t in sends]
        incoming = [(of, torch.empty_like(t, device="cpu") if host else t) for of, t in receives]
        for _, tensor in outgoing:
            self.count("send", tensor)
        ops = [dist.P2POp(dist.isend, t, group=self.group, group_peer=to) for to, t in outgoing]
        ops += [dist.P2POp(dist.irecv, t, group=self.group, group_peer=of) for of, t in incoming]
        works = dist.batch_isend_irecv(ops) if ops else []
        return Exchange(works, [t for _, t in outgoing], [t for _, t in incoming], [t for _, t in receives])

    def open(self) -> None:
        """Connect all ranks now: NCCL wants every rank in a group's first call, and an exchange may be of a few."""
        dist.all_reduce(
            torch.zeros(1, device="cuda" if "nccl" in dist.get_backend(self.group) else "cpu"), group=self.group
        )

    def narrow(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's piece along dim."""
        return tensor.chunk(self.size, dim)[self.rank]


def _join(stacked: Tensor, dim: int) -> Tensor:
    """[ranks, ...] to one tensor, joined along dim; for dim 0 without a copy."""
    if dim == 0:
        return stacked.flatten(0, 1)
    return stacked.movedim(0, dim).flatten(dim, dim + 1)
