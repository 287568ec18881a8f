"""One axis of the mesh: its group, this rank's place on it, and its collectives, each counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from weft.comm.timeline import Spans
from weft.comm.wait_counters import Meter

# torch 2.13 renamed both and warns of the old names
native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Waits(Protocol):
    """Something under way."""

    def wait(self) -> object: ...


@dataclass
class Exchange:
    """Messages on their way."""

    works: list[dist.Work]
    sent: list[Tensor]
    arrived: list[Tensor]
    wanted: list[Tensor]
    """Where they are wanted, if that is not where they arrive."""
    clock: AbstractContextManager[None] = field(default_factory=nullcontext)

    def wait(self) -> list[Tensor]:
        """What was received, in the order in which it was asked for."""
        with self.clock:
            for work in self.works:
                work.wait()
        for arrived, wanted in zip(self.arrived, self.wanted, strict=True):
            if arrived is not wanted:
                wanted.copy_(arrived)
        return self.wanted


@dataclass
class Waiting:
    """A collective under way: whoever waits for it is seen to."""

    work: dist.Work
    clock: AbstractContextManager[None]

    def wait(self) -> None:
        with self.clock:
            self.work.wait()


@dataclass(frozen=True)
class Tally:
    """What was counted of one kind of collective."""

    calls: int
    bytes: int
    seconds: float
    between: int = 0
    """Of the bytes, those that go to another node."""


@dataclass
class Axis:
    """A named group of ranks. `calls` and `bytes` count what this rank asked for and handed over, by collective.

    A rank that only receives from a root counts the call and no bytes. `seconds` counts how long this rank waited, once
    `timed` is set: until then no clock is read and no device is waited for. A collective made by hand of messages
    (weft.comm.algorithms) counts as the messages that it sends.

    `between` counts the bytes that go to other nodes. A message goes where it is addressed; a collective of the backend
    counts as a ring through the ranks in order, in which each hands everything to the next.
    """

    name: str
    group: dist.ProcessGroup
    size: int
    rank: int
    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    timed: bool = False
    nodes: tuple[int, ...] = ()
    """The node of each rank of the axis; empty where all share one."""
    between: Counter[str] = field(default_factory=Counter)
    spans: Spans | None = None
    """Notes of a step that is watched more closely."""
    meter: Meter = field(default_factory=Meter, repr=False)
    """The mesh's: where this rank waits now, and how long it has waited."""

    def count(self, what: str, tensor: Tensor, share: float = 1, to: int | None = None) -> None:
        """Note a message of which this rank hands over a share, to one rank or around the ring."""
        self.calls[what] += 1
        self.add(what, round(tensor.numel() * tensor.element_size() * share), to)

    def add(self, what: str, size: int, to: int | None = None) -> None:
        """Count bytes that are handed over."""
        self.bytes[what] += size
        leaves = bool(self.nodes) and self.nodes[(self.rank + 1) % self.size if to is None else to] != self.node
        if leaves:
            self.between[what] += size
        if self.spans is not None:
            self.spans.note(size, size if leaves else 0)

    @property
    def node(self) -> int:
        """This rank's."""
        return self.nodes[self.rank] if self.nodes else 0

    def read(self) -> dict[str, Tally]:
        """What was counted so far, by collective."""
        return {
            what: Tally(n, self.bytes[what], self.seconds.get(what, 0.0), self.between[what])
            for what, n in self.calls.items()
        }

    def reset(self) -> None:
        """Count from zero again."""
        self.calls.clear()
        self.bytes.clear()
        self.between.clear()
        self.seconds.clear()

    def _clock(self, what: str, tensor: Tensor) -> AbstractContextManager[None]:
        if self.timed:
            return self._watch(what, tensor.device)
        inside = self.meter.inside(self.name, what)
        return inside if self.spans is None else self._noted(inside, self.spans.call())

    @contextmanager
    def _noted(self, *notes: AbstractContextManager[None]) -> Iterator[None]:
        with ExitStack() as stack:
            for note in notes:
                stack.enter_context(note)
            yield

    @contextmanager
    def _watch(self, what: str, device: torch.device) -> Iterator[None]:
        began = time.perf_counter()
        with self.meter.inside(self.name, what):
            yield
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began

    def _by_host(self, tensor: Tensor) -> bool:
        """Gloo cannot do everything from GPU memory: there some messages pass through the host."""
        return tensor.is_cuda and dist.get_backend(self.group) == "gloo"

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce in place and return the tensor."""
        self.count("all_reduce", tensor)
        with self._clock("all_reduce", tensor):
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> Waits:
        """Begin a sum in place; wait() on what is returned."""
        self.count("all_reduce", tensor)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        if self.timed:
            return Waiting(work, self._clock("all_reduce", tensor))
        followed = work if self.spans is None else self.spans.follow(work)
        return Waiting(followed, self.meter.inside(self.name, "all_reduce"))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The pieces of all ranks, joined along dim."""
        tensor = tensor.contiguous()
        self.count("all_gather", tensor)
        out = tensor.new_empty((self.size, *tensor.shape))
        with self._clock("all_gather", tensor):
            native_all_gather(out.view(-1), tensor.view(-1), group=self.group)
        return _join(out, dim)

    def _halves_links(self, tensor: Tensor) -> bool:
        return not tensor.is_cuda and not isinstance(tensor, FakeTensor) and dist.get_backend(self.group) == "gloo"

    def start_swap(self, pieces: Tensor) -> tuple[Tensor, Waits]:
        """Begin all_to_all() with all ranks, both ways of each link at once."""
        pieces, out = pieces.contiguous(), torch.empty_like(pieces)
        self.calls["all_to_all"] += 1
        for peer in range(self.size):
            if peer != self.rank:  # its own piece stays
                self.add("all_to_all", pieces[0].numel() * pieces.element_size(), peer)
        if self._halves_links(pieces):
            works = self._start_swap(pieces.unbind(0), out)
        else:
            works = [dist.all_to_all_single(out, pieces, group=self.group, async_op=True)]
        return out, self._begun("all_to_all", pieces, works)

    def start_gather(self, tensor: Tensor) -> tuple[Tensor, Waits]:
        """Begin all_gather() along the first dimension, both ways of each link at once."""
        tensor = tensor.contiguous()
        self.count("all_gather", tensor)
        out = tensor.new_empty((self.size, *tensor.shape))
        if self._halves_links(tensor):
            works = self._start_swap([tensor] * self.size, out)
        else:
            works = [native_all_gather(out.view(-1), tensor.view(-1), group=self.group, async_op=True)]
        return out.flatten(0, 1), self._begun("all_gather", tensor, works)

    def _begun(self, what: str, tensor: Tensor, works: Sequence[dist.Work | None]) -> Waits:
        under_way = [work for work in works if work is not None]
        if self.timed:
            return Exchange(under_way, [tensor], [], [], self._clock(what, tensor))
        if self.spans is not None:
            under_way = [self.spans.follow(work) for work in under_way]
        return Exchange(under_way, [tensor], [], [], self.meter.inside(self.name, what))

    def _start_swap(self, pieces: Sequence[Tensor], out: Tensor) -> list[dist.Work | None]:
        """Hand pieces[i] to the i-th rank and fill out[i] with what it hands to us, both ways of each link at once.

        Gloo tells a peer that it may send in the same stream in which it sends itself. Its own all-to-all and
        all-gather say so behind their data where a rank is late, and the peer waits for all of it: half the speed.
        """
        others = [r for r in range(self.size) if r != self.rank]
        works = [dist.irecv(out[r], group=self.group, group_src=r) for r in others]
        works += [dist.isend(pieces[r], group=self.group, group_dst=r) for r in others]
        out[self.rank].copy_(pieces[self.rank])
        return works

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """The sum over all ranks, of which each keeps its piece along dim."""
        pieces = torch.stack(tensor.chunk(self.size, dim))
        self.count("reduce_scatter", pieces)
        out = torch.empty_like(pieces[0])
        with self._clock("reduce_scatter", tensor):
            native_reduce_scatter(out.view(-1), pieces.view(-1), group=self.group)
        return out

    def all_to_all(self, pieces: Tensor, peers: range) -> Tensor:
        """Hand pieces[i] to the i-th of `peers`, of which this rank is one, and get its piece for us: [peers, ...]."""
        pieces = pieces.contiguous()
        self.calls["all_to_all"] += 1
        for peer in peers:
            if peer != self.rank:  # its own piece stays
                self.add("all_to_all", pieces[0].numel() * pieces.element_size(), peer)
        splits = [int(r in peers) for r in range(self.size)]
        out = torch.empty_like(pieces)
        with self._clock("all_to_all", pieces):
            dist.all_to_all_single(out, pieces, splits, splits, group=self.group)
        return out

    def start_all_to_all(self, x: Tensor, send: list[int], receive: list[int]) -> tuple[Tensor, Waits]:
        """Begin to hand send[i] of the rows to the i-th rank, and to get receive[i] rows from it, in rank order."""
        x = x.contiguous()
        out = x.new_empty((sum(receive), *x.shape[1:]))
        self.calls["all_to_all"] += 1
        staying = x[: send[self.rank]].numel()
        self.bytes["all_to_all"] += (x.numel() - staying) * x.element_size()
        work = dist.all_to_all_single(out, x, receive, send, group=self.group, async_op=True)
        assert work is not None
        return out, Waiting(work, self._clock("all_to_all", x)) if self.timed else work

    def swap(self, counts: Tensor) -> Tensor:
        """Hand counts[i] to the i-th rank and get its counts for us: [ranks, ...]."""
        counts = counts.contiguous()
        self.count("counts", counts)
        out = torch.empty_like(counts)
        with self._clock("counts", counts):
            dist.all_to_all_single(out, counts, group=self.group)
        return out

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Fill the tensor with that of one rank of the axis, in place, and return it."""
        self.count("broadcast", tensor, float(self.rank == source))
        whole = tensor.contiguous()
        with self._clock("broadcast", tensor):
            dist.broadcast(whole, group=self.group, group_src=source)
        return tensor if whole is tensor else tensor.copy_(whole)

    def reduce(self, tensor: Tensor, to: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor | None:
        """The sum over all ranks, on one of them; None on the others. The tensor itself stays as it was."""
        self.count("reduce", tensor, float(self.rank != to), to)
        held = tensor.cpu() if self._by_host(tensor) else tensor
        held = held.clone(memory_format=torch.contiguous_format)
        with self._clock("reduce", tensor):
            dist.reduce(held, op=op, group=self.group, group_dst=to)
        return held.to(tensor.device) if self.rank == to else None

    def scatter(self, pieces: Tensor | None, out: Tensor, source: int) -> Tensor:
        """Give pieces[i], [ranks, ...], of one rank to the i-th; each gets its own in `out`."""
        self.count("scatter", out, 0)
        for other in range(self.size):
            if self.rank == source != other:
                self.add("scatter", out.numel() * out.element_size(), other)
        host = self._by_host(out)
        into = torch.empty_like(out, device="cpu" if host else None, memory_format=torch.contiguous_format)
        given = None
        if pieces is not None and self.rank == source:
            given = list((pieces.cpu() if host else pieces).contiguous().unbind(0))
        with self._clock("scatter", out):
            dist.scatter(into, given, group=self.group, group_src=source)
        return out.copy_(into)

    def gather(self, tensor: Tensor, to: int) -> Tensor | None:
        """The tensors of all ranks on one of them, [ranks, ...]; None on the others."""
        self.count("gather", tensor, float(self.rank != to), to)
        held = (tensor.cpu() if self._by_host(tensor) else tensor).contiguous()
        out = held.new_empty((self.size, *held.shape)) if self.rank == to else None
        with self._clock("gather", tensor):
            dist.gather(held, None if out is None else list(out.unbind(0)), group=self.group, group_dst=to)
        return None if out is None else out.to(tensor.device)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send to one rank of the axis, which receives; returns when it has."""
        self.start_exchange([(to, tensor)], []).wait()

    def receive(self, out: Tensor, source: int) -> Tensor:
        """Fill `out` with what one rank of the axis sends."""
        into = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        self.start_exchange([], [(source, into)]).wait()
        return out if into is out else out.copy_(into)

    def start_exchange(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Exchange:
        """Begin to send to and receive from some ranks of the axis; messages between two ranks keep their order."""
        # Gloo cannot send from GPU memory: there messages pass through the host
        host = any(t.is_cuda for _, t in (*sends, *receives)) and dist.get_backend(self.group) == "gloo"
        outgoing = [(to, (t.cpu() if host else t).contiguous()) for to, t in sends]
        incoming = [(of, torch.empty_like(t, device="cpu") if host else t) for of, t in receives]
        for to, tensor in outgoing:
            self.count("send", tensor, to=to)
        ops = [dist.P2POp(dist.irecv, t, group=self.group, group_peer=of) for of, t in incoming]  # see _start_swap
        ops += [dist.P2POp(dist.isend, t, group=self.group, group_peer=to) for to, t in outgoing]
        works = dist.batch_isend_irecv(ops) if ops else []
        clock = self._clock("send" if sends else "receive", (sends or receives)[0][1]) if ops else nullcontext()
        return Exchange(works, [t for _, t in outgoing], [t for _, t in incoming], [t for _, t in receives], clock)

    def open(self) -> None:
        """Connect all ranks now: NCCL wants every rank in a group's first call, and an exchange may be of a few."""
        one = torch.zeros(1, device="cuda" if "nccl" in dist.get_backend(self.group) else "cpu")
        with self.meter.inside(self.name, "open"):
            dist.all_reduce(one, group=self.group)

    def narrow(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's piece along dim."""
        return tensor.chunk(self.size, dim)[self.rank]


def _join(stacked: Tensor, dim: int) -> Tensor:
    """[ranks, ...] to one tensor, joined along dim; for dim 0 without a copy."""
    if dim == 0:
        return stacked.flatten(0, 1)
    return stacked.movedim(0, dim).flatten(dim, dim + 1)
