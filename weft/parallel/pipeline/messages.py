"""Messages between pipeline stages: which message follows an action, the order of all of them, and how they are sent.

NCCL runs the sends and receives of a communicator one after the other, in the order in which a rank issues them, and a
send ends only when its receive runs. So all ranks of a pipeline issue their messages in one common order, made from the
schedule's action lists. The first message of that order that is not done yet always has both of its ranks ready for it,
whatever its size: the pipeline cannot deadlock. Over Gloo and MPI, which allow more, the order is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.axis import Axis
from weft.comm.gloo_internals import is_gloo
from weft.comm.point_to_point_internals import batch_isend_irecv
from weft.parallel.pipeline.boundary import Layout
from weft.planner.engine_constants import PREFETCHED_MESSAGES
from weft.planner.schedules.actions import Action, Schedule
from weft.planner.schedules.simulate import equal_costs, simulate


class Message(NamedTuple):
    """What one stage sends another: the activations ("F") or gradients ("B") of a microbatch for stage `to`."""

    kind: str
    to: int
    microbatch: int


class Transfer(NamedTuple):
    """A message from one rank of the pp axis to another."""

    message: Message
    source: int
    target: int


def sent_by(action: Action, schedule: Schedule) -> Message | None:
    """The message that follows an action, if any."""
    if action.kind == "F" and action.stage < schedule.stages - 1:
        return Message("F", action.stage + 1, action.microbatch)
    if action.kind in ("B", "I") and action.stage > 0:
        return Message("B", action.stage - 1, action.microbatch)
    return None


def transfer_order(schedule: Schedule) -> list[Transfer]:
    """All transfers of a step in one order: by the time at which the simulator sees their action end.

    An action ends later than every action it depends on, so a message comes before everything that follows from it, and
    the sends of a rank are in the order of its list.
    """
    spans = simulate(schedule, equal_costs(schedule.stages)).spans
    order = []
    for span in sorted(spans, key=lambda s: (s.end, s.rank)):
        message = sent_by(Action(span.kind, span.stage, span.microbatch), schedule)
        if message is not None and (target := schedule.rank_of[message.to]) != span.rank:
            order.append(Transfer(message, span.rank, target))
    return order


def transfers_of(schedule: Schedule, rank: int) -> tuple[Transfer, ...]:
    """The transfers that a rank takes part in, in the order in which it issues them."""
    return tuple(t for t in transfer_order(schedule) if rank in (t.source, t.target))


class StageLinks:
    """Sends and receives of one rank along the pp axis, each issued as its own group on the axis' communicator.

    A receive is issued as early as the order allows: right after the transfer before it, up to
    PREFETCHED_MESSAGES from one rank.
    """

    def __init__(self, axis: Axis, device: torch.device):
        self.axis, self.device = axis, device
        # Gloo cannot send from GPU memory: there messages pass through the host
        self.host = device.type == "cuda" and is_gloo(axis.group)
        self.keep_sent = True
        """Whether tensors stay alive until they were sent; a dry run of NCCL sets this to false."""

    def begin(self, transfers: Sequence[Transfer], layout: Callable[[Message], Layout]) -> None:
        """Start a step with these transfers; `layout` gives the shape and dtype of a message."""
        self.transfers, self.layout = transfers, layout
        self.issued = 0
        self.under_way: Counter[int] = Counter()
        self.posted: dict[Message, tuple[list[dist.Work], Tensor]] = {}
        self.local: dict[Message, Tensor] = {}
        self.outgoing: list[tuple[list[dist.Work], Tensor]] = []
        self._prefetch()

    def receive(self, message: Message, source: int) -> Tensor:
        """Wait for a message and return it."""
        if source == self.axis.rank:
            return self.local.pop(message)
        while message not in self.posted:
            self._post_receive(message)
        works, buffer = self.posted.pop(message)
        with self.axis.meter.inside(self.axis.name, "receive"):
            for work in works:
                work.wait()
        self.under_way[source] -= 1
        self._prefetch()
        return buffer.to(self.device)

    def send(self, message: Message, target: int, tensor: Tensor) -> None:
        """Begin to send a message, after the transfers that precede it."""
        if target == self.axis.rank:
            self.local[message] = tensor
            return
        transfer = Transfer(message, self.axis.rank, target)
        while self._next() != transfer:
            self._post_receive(message)
        tensor = (tensor.cpu() if self.host else tensor).contiguous()
        self.axis.count("send", tensor, to=target)
        works = self._issue(dist.isend, tensor, target)
        self.outgoing = [(w, t) for w, t in self.outgoing if not all(x.is_completed() for x in w)]
        if self.keep_sent:
            self.outgoing.append((works, tensor))
        self._prefetch()

    def end(self) -> None:
        """Wait until everything was sent."""
        if self.issued != len(self.transfers):
            raise RuntimeError(f"the step ended before {self.transfers[self.issued]}")
        with self.axis.meter.inside(self.axis.name, "send"):
            for works, _ in self.outgoing:
                for work in works:
                    work.wait()
        self.outgoing = []

    def exchange(self, other: int, tensor: Tensor) -> Tensor:
        """Swap equal tensors with another rank of the axis."""
        mine = (tensor.cpu() if self.host else tensor).contiguous()
        theirs = torch.empty_like(mine)
        ops = [self._op(dist.isend, mine, other), self._op(dist.irecv, theirs, other)]
        with self.axis.meter.inside(self.axis.name, "exchange"):
            for work in batch_isend_irecv(ops):
                work.wait()
        return theirs.to(self.device)

    def send_alone(self, target: int, tensor: Tensor) -> None:
        """Send a tensor outside of a schedule and wait until it was received."""
        mine = (tensor.cpu() if self.host else tensor.to(self.device)).contiguous()
        for work in batch_isend_irecv([self._op(dist.isend, mine, target)]):
            work.wait()

    def receive_alone(self, source: int, layout: Layout) -> Tensor:
        """Receive what the source sends with send_alone()."""
        shape, dtype = layout
        theirs = torch.empty(shape, dtype=dtype, device=torch.device("cpu") if self.host else self.device)
        for work in batch_isend_irecv([self._op(dist.irecv, theirs, source)]):
            work.wait()
        return theirs.to(self.device)

    def _next(self) -> Transfer | None:
        return self.transfers[self.issued] if self.issued < len(self.transfers) else None

    def _prefetch(self) -> None:
        me = self.axis.rank
        while (t := self._next()) is not None and t.target == me and self.under_way[t.source] < PREFETCHED_MESSAGES:
            self._post_receive(t.message)

    def _post_receive(self, wanted: Message) -> None:
        transfer = self._next()
        if transfer is None or transfer.target != self.axis.rank:
            raise RuntimeError(f"{wanted} comes before {transfer}: this is not the order of the schedule")
        where = torch.device("cpu") if self.host else self.device
        shape, dtype = self.layout(transfer.message)
        buffer = torch.empty(shape, dtype=dtype, device=where)
        self.posted[transfer.message] = (self._issue(dist.irecv, buffer, transfer.source), buffer)
        self.under_way[transfer.source] += 1

    def _issue(self, op: Callable[..., dist.Work | None], tensor: Tensor, peer: int) -> list[dist.Work]:
        """One send or receive. Batched, since a single one makes NCCL create a communicator for the pair."""
        self.issued += 1
        return batch_isend_irecv([self._op(op, tensor, peer)])

    def _op(self, op: Callable[..., dist.Work | None], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(op, tensor, group=self.axis.group, group_peer=peer)
