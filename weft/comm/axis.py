"""One axis of the mesh: its process group, this rank's place in it, and its collectives with counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.fake_internals import is_fake
from weft.comm.gloo_internals import is_gloo
from weft.comm.meter import Meter
from weft.comm.point_to_point_internals import batch_isend_irecv

# torch 2.13 renamed both functions and warns about the old names
native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """A communication that was started."""

    def wait(self) -> object: ...


@dataclass
class Exchange:
    """Point-to-point messages that were started."""

    works: list[dist.Work]
    sent: list[Tensor]
    arrived: list[Tensor]
    wanted: list[Tensor]
    """The tensors to fill; they differ from `arrived` where a message passes through the host."""
    meter: AbstractContextManager[None] = field(default_factory=nullcontext)

    def wait(self) -> list[Tensor]:
        """Return the received tensors, in the order of the receives."""
        with self.meter:
            for work in self.works:
                work.wait()
        for arrived, wanted in zip(self.arrived, self.wanted, strict=True):
            if arrived is not wanted:
                wanted.copy_(arrived)
        return self.wanted


@dataclass
class Metered:
    """A collective that was started; waiting for it is counted."""

    work: dist.Work
    meter: AbstractContextManager[None]

    def wait(self) -> None:
        with self.meter:
            self.work.wait()


@dataclass(frozen=True)
class Tally:
    """Calls and bytes of one kind of collective."""

    calls: int
    bytes: int
    between: int = 0
    """Bytes sent to another node."""


@dataclass
class Axis:
    """A named group of ranks. `calls` and `bytes` count, by collective, the calls and the bytes this rank sends.

    A rank that only receives from a root counts the call and no bytes. A collective composed of messages
    (weft.comm.algorithms) counts as the messages it sends.

    `between` counts bytes sent to other nodes: of a message those to its destination, of a backend's collective those
    of a ring through the ranks in order.
    """

    name: str
    group: dist.ProcessGroup
    size: int
    rank: int
    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    nodes: tuple[int, ...] = ()
    """The node of each rank of the axis; empty if all are on one node."""
    between: Counter[str] = field(default_factory=Counter)
    meter: Meter = field(default_factory=Meter, repr=False)
    """The mesh's meter: which collective this rank waits in, how long it waited, and the timeline of a timed step."""

    def count(self, what: str, tensor: Tensor, share: float = 1, to: int | None = None) -> None:
        """Count a call that sends a share of the tensor, to one rank or around the ring."""
        self.calls[what] += 1
        self.add(what, round(tensor.numel() * tensor.element_size() * share), to)

    def add(self, what: str, size: int, to: int | None = None) -> None:
        """Count sent bytes."""
        self.bytes[what] += size
        between = bool(self.nodes) and self.nodes[(self.rank + 1) % self.size if to is None else to] != self.node
        if between:
            self.between[what] += size
        if self.meter.timeline is not None:
            self.meter.timeline.count(size, size if between else 0)

    def _count_all_to_all(self, peers: Iterable[tuple[int, int]], row: Tensor) -> None:
        """Count an all-to-all of so many rows for each peer; a rank's own rows are not sent."""
        self.calls["all_to_all"] += 1
        for peer, rows in peers:
            if peer != self.rank:
                self.add("all_to_all", rows * row.numel() * row.element_size(), peer)

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.nodes[self.rank] if self.nodes else 0

    def read(self) -> dict[str, Tally]:
        """The counters so far, by collective."""
        return {what: Tally(n, self.bytes[what], self.between[what]) for what, n in self.calls.items()}

    def reset(self) -> None:
        """Set the counters to zero."""
        self.calls.clear()
        self.bytes.clear()
        self.between.clear()

    def _blocking(self, what: str) -> AbstractContextManager[None]:
        """Around a collective that is complete when the call returns."""
        return self.meter.blocking(self.name, what)

    def _through_host(self, tensor: Tensor) -> bool:
        """Whether messages pass through the host: Gloo does not support every collective on GPU tensors."""
        return tensor.is_cuda and is_gloo(self.group)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce in place and return the tensor."""
        self.count("all_reduce", tensor)
        with self._blocking("all_reduce"):
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Start a sum in place; call wait() on the result."""
        self.count("all_reduce", tensor)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return Metered(self.meter.follow(work, self.name, "all_reduce"), self.meter.inside(self.name, "all_reduce"))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The shards of all ranks, concatenated along dim."""
        tensor = tensor.contiguous()
        self.count("all_gather", tensor)
        out = tensor.new_empty((self.size, *tensor.shape))
        with self._blocking("all_gather"):
            native_all_gather(out.view(-1), tensor.view(-1), group=self.group)
        return _join(out, dim)

    def _halves_links(self, tensor: Tensor) -> bool:
        return not tensor.is_cuda and not is_fake(tensor) and is_gloo(self.group)

    def start_swap(self, shards: Tensor) -> tuple[Tensor, Pending]:
        """Start all_to_all() over all ranks, using both directions of each link at once."""
        shards, out = shards.contiguous(), torch.empty_like(shards)
        self._count_all_to_all(((peer, 1) for peer in range(self.size)), shards[0])
        if self._halves_links(shards):
            works = self._start_swap(shards.unbind(0), out)
        else:
            works = [dist.all_to_all_single(out, shards, group=self.group, async_op=True)]
        return out, self._started("all_to_all", shards, works)

    def start_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """Start all_gather() along the first dimension, using both directions of each link at once."""
        tensor = tensor.contiguous()
        self.count("all_gather", tensor)
        out = tensor.new_empty((self.size, *tensor.shape))
        if self._halves_links(tensor):
            works = self._start_swap([tensor] * self.size, out)
        else:
            works = [native_all_gather(out.view(-1), tensor.view(-1), group=self.group, async_op=True)]
        return out.flatten(0, 1), self._started("all_gather", tensor, works)

    def _started(self, what: str, tensor: Tensor, works: Sequence[dist.Work | None]) -> Exchange:
        followed = [self.meter.follow(work, self.name, what) for work in works if work is not None]
        return Exchange(followed, [tensor], [], [], self.meter.inside(self.name, what))

    def _start_swap(self, shards: Sequence[Tensor], out: Tensor) -> list[dist.Work | None]:
        """Send shards[i] to the i-th rank and fill out[i] from it, using both directions of each link at once.

        Gloo announces that a receive buffer is ready in the same stream that carries its data. In its own all-to-all
        and all-gather a late rank announces after its data, so its peer waits for all of it, at half the speed.
        """
        others = [r for r in range(self.size) if r != self.rank]
        works = [dist.irecv(out[r], group=self.group, group_src=r) for r in others]
        works += [dist.isend(shards[r], group=self.group, group_dst=r) for r in others]
        out[self.rank].copy_(shards[self.rank])
        return works

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's shard, along dim, of the sum over all ranks."""
        shards = torch.stack(tensor.chunk(self.size, dim))
        self.count("reduce_scatter", shards)
        out = torch.empty_like(shards[0])
        with self._blocking("reduce_scatter"):
            native_reduce_scatter(out.view(-1), shards.view(-1), group=self.group)
        return out

    def all_to_all(self, shards: Tensor, peers: range) -> Tensor:
        """Send shards[i] to the i-th of `peers`, which include this rank; returns their shards for it, [peers, ...]."""
        shards = shards.contiguous()
        self._count_all_to_all(((peer, 1) for peer in peers), shards[0])
        splits = [int(r in peers) for r in range(self.size)]
        out = torch.empty_like(shards)
        with self._blocking("all_to_all"):
            dist.all_to_all_single(out, shards, splits, splits, group=self.group)
        return out

    def start_all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> tuple[Tensor, Pending]:
        """Start to send send[i] rows to the i-th rank and to receive receive[i] rows from it, in rank order."""
        x = x.contiguous()
        out = x.new_empty((sum(receive), *x.shape[1:]))
        self._count_all_to_all(enumerate(send), x[:1])
        work = dist.all_to_all_single(out, x, receive, send, group=self.group, async_op=True)
        return out, self._started("all_to_all", x, [work])

    def swap(self, counts: Tensor) -> Tensor:
        """Send counts[i] to the i-th rank; returns the counts of all ranks for this one, [ranks, ...]."""
        counts = counts.contiguous()
        self.count("counts", counts)
        out = torch.empty_like(counts)
        with self._blocking("counts"):
            dist.all_to_all_single(out, counts, group=self.group)
        return out

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Fill the tensor in place with that of one rank of the axis, and return it."""
        self.count("broadcast", tensor, float(self.rank == source))
        whole = tensor.contiguous()
        with self._blocking("broadcast"):
            dist.broadcast(whole, group=self.group, group_src=source)
        return tensor if whole is tensor else tensor.copy_(whole)

    def reduce(self, tensor: Tensor, to: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor | None:
        """The sum over all ranks on one of them; None on the others. The input is not changed."""
        self.count("reduce", tensor, float(self.rank != to), to)
        held = tensor.cpu() if self._through_host(tensor) else tensor
        held = held.clone(memory_format=torch.contiguous_format)
        with self._blocking("reduce"):
            dist.reduce(held, op=op, group=self.group, group_dst=to)
        return held.to(tensor.device) if self.rank == to else None

    def scatter(self, shards: Tensor | None, out: Tensor, source: int) -> Tensor:
        """Send shards[i], [ranks, ...], from one rank to the i-th; each receives its own in `out`."""
        self.count("scatter", out, 0)
        for other in range(self.size):
            if self.rank == source != other:
                self.add("scatter", out.numel() * out.element_size(), other)
        host = self._through_host(out)
        into = torch.empty_like(out, device="cpu" if host else None, memory_format=torch.contiguous_format)
        given = None
        if shards is not None and self.rank == source:
            given = list((shards.cpu() if host else shards).contiguous().unbind(0))
        with self._blocking("scatter"):
            dist.scatter(into, given, group=self.group, group_src=source)
        return out.copy_(into)

    def gather(self, tensor: Tensor, to: int) -> Tensor | None:
        """The tensors of all ranks on one of them, [ranks, ...]; None on the others."""
        self.count("gather", tensor, float(self.rank != to), to)
        held = (tensor.cpu() if self._through_host(tensor) else tensor).contiguous()
        out = held.new_empty((self.size, *held.shape)) if self.rank == to else None
        with self._blocking("gather"):
            dist.gather(held, None if out is None else list(out.unbind(0)), group=self.group, group_dst=to)
        return None if out is None else out.to(tensor.device)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send to one rank of the axis; returns when it was sent."""
        self.start_exchange([(to, tensor)], []).wait()

    def receive(self, out: Tensor, source: int) -> Tensor:
        """Fill `out` with a message from one rank of the axis."""
        into = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        self.start_exchange([], [(source, into)]).wait()
        return out if into is out else out.copy_(into)

    def start_exchange(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Exchange:
        """Start to send to and receive from some ranks of the axis; messages between two ranks keep their order."""
        host = any(t.is_cuda for _, t in (*sends, *receives)) and is_gloo(self.group)
        outgoing = [(to, (t.cpu() if host else t).contiguous()) for to, t in sends]
        incoming = [(of, torch.empty_like(t, device="cpu") if host else t) for of, t in receives]
        for to, tensor in outgoing:
            self.count("send", tensor, to=to)
        ops = [dist.P2POp(dist.irecv, t, group=self.group, group_peer=of) for of, t in incoming]  # see _start_swap
        ops += [dist.P2POp(dist.isend, t, group=self.group, group_peer=to) for to, t in outgoing]
        works = batch_isend_irecv(ops) if ops else []
        meter = self._blocking("send" if sends else "receive") if ops else nullcontext()
        return Exchange(works, [t for _, t in outgoing], [t for _, t in incoming], [t for _, t in receives], meter)

    def open(self) -> None:
        """Connect all ranks now: NCCL needs every rank in a group's first call, an exchange may be between two."""
        one = torch.zeros(1, device="cuda" if "nccl" in dist.get_backend(self.group) else "cpu")
        with self.meter.inside(self.name, "open"):
            dist.all_reduce(one, group=self.group)

    def narrow(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's shard along dim."""
        return tensor.chunk(self.size, dim)[self.rank]


def _join(stacked: Tensor, dim: int) -> Tensor:
    """[ranks, ...] as one tensor, concatenated along dim; without a copy for dim 0."""
    if dim == 0:
        return stacked.flatten(0, 1)
    return stacked.movedim(0, dim).flatten(dim, dim + 1)
