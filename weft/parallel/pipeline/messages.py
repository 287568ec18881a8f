"""Messages between the stages of a pipeline: what follows an action, and how it travels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.axis import Axis
from weft.planner.engine_constants import PREFETCHED_MESSAGES
from weft.planner.schedules.actions import Action, Schedule


class Message(NamedTuple):
    """What one stage sends another: the activations ("F") or gradients ("B") of a microbatch for stage `to`."""

    kind: str
    to: int
    microbatch: int


def sent_by(action: Action, schedule: Schedule) -> Message | None:
    """The message that follows an action, if any."""
    if action.kind == "F" and action.stage < schedule.stages - 1:
        return Message("F", action.stage + 1, action.microbatch)
    if action.kind in ("B", "I") and action.stage > 0:
        return Message("B", action.stage - 1, action.microbatch)
    return None


class Wire:
    """Messages along the pp axis. Both ends know the whole schedule, so a pair's messages travel in one known order."""

    def __init__(self, axis: Axis, device: torch.device, dtype: torch.dtype):
        self.axis, self.device, self.dtype = axis, device, dtype
        # Gloo cannot send from GPU memory: there messages pass through the host
        self.host = device.type == "cuda" and dist.get_backend(axis.group) == "gloo"
        self.nobody = False  # a dry run of a network that says when a message has left: what is sent is gone at once
        self.peers = [dist.get_global_rank(axis.group, r) for r in range(axis.size)]

    def begin(self, lists: list[list[Action]], schedule: Schedule, shape: Callable[[Message], tuple[int, ...]]) -> None:
        """Learn from the ranks' lists what will arrive, from whom, and in which order."""
        self.schedule, self.shape = schedule, shape
        self.coming: dict[int, Iterator[Message]] = {}
        for source, actions in enumerate(lists):
            messages = [m for a in actions if (m := sent_by(a, schedule)) and self._goes_here(m, source)]
            if messages:
                self.coming[source] = iter(messages)
        self.posted: dict[Message, tuple[dist.Work, Tensor, int]] = {}
        self.local: dict[Message, Tensor] = {}
        self.outgoing: list[tuple[dist.Work, Tensor]] = []
        for source in self.coming:
            for _ in range(PREFETCHED_MESSAGES):
                self._post(source)

    def _goes_here(self, message: Message, source: int) -> bool:
        return source != self.axis.rank and self.schedule.rank_of[message.to] == self.axis.rank

    def _post(self, source: int) -> bool:
        message = next(self.coming[source], None)
        if message is None:
            return False
        where = torch.device("cpu") if self.host else self.device
        buffer = torch.empty(self.shape(message), dtype=self.dtype, device=where)
        work = dist.irecv(buffer, self.peers[source], group=self.axis.group)
        assert work is not None
        self.posted[message] = (work, buffer, source)
        return True

    def receive(self, message: Message, source: int) -> Tensor:
        if source == self.axis.rank:
            return self.local.pop(message)
        while message not in self.posted:
            if not self._post(source):
                raise RuntimeError(f"{message} was never sent by stage rank {source}: the schedule is wrong")
        work, buffer, _ = self.posted.pop(message)
        with self.axis.meter.inside(self.axis.name, "receive"):
            work.wait()
        self._post(source)
        return buffer.to(self.device)

    def send(self, message: Message, tensor: Tensor) -> None:
        to = self.schedule.rank_of[message.to]
        if to == self.axis.rank:
            self.local[message] = tensor
            return
        tensor = (tensor.cpu() if self.host else tensor).contiguous()
        self.axis.count("send", tensor, to=to)
        work = dist.isend(tensor, self.peers[to], group=self.axis.group)
        assert work is not None
        self.outgoing = [(w, t) for w, t in self.outgoing if not w.is_completed()]
        if not self.nobody:
            self.outgoing.append((work, tensor))

    def end(self) -> None:
        with self.axis.meter.inside(self.axis.name, "send"):
            for work, _ in self.outgoing:
                work.wait()
        self.outgoing = []

    def exchange(self, other: int, tensor: Tensor) -> Tensor:
        """Swap equal tensors with another rank of the axis."""
        mine = (tensor.cpu() if self.host else tensor).contiguous()
        theirs = torch.empty_like(mine)
        peer, group = self.peers[other], self.axis.group
        ops = [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
        with self.axis.meter.inside(self.axis.name, "exchange"):
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        return theirs.to(self.device)
