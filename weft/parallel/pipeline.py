"""Pipeline parallelism: an executor that follows a schedule's list of actions, and the messages between stages.

The lists come from plan/schedule.py, and the simulator reads the same ones. Stages are Woven models, so each may be cut
over tp and dp_shard and copied over dp_replicate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from weft.comm import Axis
from weft.comm.pieces import local_of
from weft.parallel.woven import Batch, LossOf, Woven
from weft.plan.schedule import Action, Schedule

AHEAD = 2
"""Messages from one rank that may be on their way before they are needed."""
TWIN = "~"
"""Ends the name of a tied weight that this rank holds a second time, in another stage; it is never saved."""


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
            for _ in range(AHEAD):
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
        work.wait()
        self._post(source)
        return buffer.to(self.device)

    def send(self, message: Message, tensor: Tensor) -> None:
        to = self.schedule.rank_of[message.to]
        if to == self.axis.rank:
            self.local[message] = tensor
            return
        tensor = (tensor.cpu() if self.host else tensor).contiguous()
        self.axis.count("send", tensor)
        work = dist.isend(tensor, self.peers[to], group=self.axis.group)
        assert work is not None
        self.outgoing = [(w, t) for w, t in self.outgoing if not w.is_completed()]
        self.outgoing.append((work, tensor))

    def end(self) -> None:
        for work, _ in self.outgoing:
            work.wait()
        self.outgoing = []

    def exchange(self, other: int, tensor: Tensor) -> Tensor:
        """Swap equal tensors with another rank of the axis."""
        mine = (tensor.cpu() if self.host else tensor).contiguous()
        theirs = torch.empty_like(mine)
        peer, group = self.peers[other], self.axis.group
        ops = [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return theirs.to(self.device)


class Spans:
    """When each action of one step began and ended, for the picture; nothing is kept unless `wanted`."""

    def __init__(self, device: torch.device) -> None:
        self.wanted, self.device = False, device
        self.spans: list[tuple[str, int, int, float, float]] = []

    def now(self) -> float:
        if not self.wanted:
            return 0.0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.time()

    def add(self, kind: str, stage: int, microbatch: int, start: float) -> None:
        if self.wanted:
            self.spans.append((kind, stage, microbatch, start, self.now()))


class Pipelined:
    """The stages of this rank and the schedule they follow. To the loop it looks like one Woven model."""

    def __init__(
        self, stages: dict[int, Woven], schedule: Schedule, axis: Axis, device: torch.device, dtype: torch.dtype,
        sequence_cut: int,
    ):  # fmt: skip
        self.stages, self.schedule, self.axis, self.sequence_cut = stages, schedule, axis, sequence_cut
        self.device = device
        self.wire = Wire(axis, device, dtype)
        self.spans = Spans(device)
        self.last = schedule.stages - 1
        self.masters: dict[str, Tensor] = {}
        self.counted: list[Tensor] = []
        for index in sorted(stages):
            for name, master in stages[index].masters.items():
                copy_of_another = name in stages[index].aliases.values()
                self.masters[name + TWIN if name in self.masters else name] = master
                if not copy_of_another:
                    self.counted.append(master)
        self.splits = any(a.kind in "IW" for a in schedule.actions[axis.rank])

    @property
    def frozen(self) -> dict[str, Tensor]:
        return {n: p for stage in self.stages.values() for n, p in stage.frozen.items()}

    def buffers(self) -> dict[str, Tensor]:
        return {n: b for stage in self.stages.values() for n, b in stage.buffers().items()}

    def backward(self, batches: list[Batch], loss_of: LossOf, scale: float) -> Tensor:
        """One step of the schedule: the gradients of loss · scale. The loss is where the last stage is, 0 elsewhere."""
        if len(batches) != self.schedule.microbatches:
            raise RuntimeError(f"{len(batches)} microbatches for a schedule of {self.schedule.microbatches}")
        step = _Step(self, batches, loss_of, scale)
        actions = self.schedule.actions[self.axis.rank]
        final = {a.stage: i for i, a in enumerate(actions) if a.kind in ("B", "W")}
        self.wire.begin([list(x) for x in self.schedule.actions], self.schedule, step.shape)
        for stage in self.stages.values():
            stage.data.hold(self.splits)
        for i, action in enumerate(actions):
            step.do(action, last=final[action.stage] == i)
        self.wire.end()
        for stage in self.stages.values():
            stage.finish()
        self._sum_tied()
        return step.total

    @torch.no_grad()
    def evaluate(self, batches: list[Batch], loss_of: LossOf) -> Tensor:
        """The summed loss of some batches where the last stage is, 0 elsewhere."""
        for stage in self.stages.values():
            stage.module.eval()
        lists = [
            [Action("F", s, m) for m in range(len(batches)) for s in self.schedule.stages_of(rank)]
            for rank in range(self.axis.size)
        ]
        step = _Step(self, batches, loss_of, 1.0)
        self.wire.begin(lists, self.schedule, step.shape)
        for action in lists[self.axis.rank]:
            step.do(action, last=False)
            step.held.clear()
        self.wire.end()
        for stage in self.stages.values():
            stage.data.settle()
            stage.module.train()
        return step.total

    def zero_grad(self) -> None:
        for stage in self.stages.values():
            stage.zero_grad()

    def refresh(self) -> None:
        for stage in self.stages.values():
            stage.refresh()

    def _sum_tied(self) -> None:
        """A weight that two stages share gets the sum of their gradients, on both."""
        owner, copy = self.schedule.rank_of[0], self.schedule.rank_of[self.last]
        names = set(self.tied)
        if owner == copy:
            for name in names & self.masters.keys():
                ours, twins = self._grad(name), self._grad(name + TWIN)
                ours += twins
                twins.copy_(ours)
        elif self.axis.rank in (owner, copy):
            for name in sorted(names & self.masters.keys()):
                grad = self._grad(name)
                grad += self.wire.exchange(copy if self.axis.rank == owner else owner, grad).view_as(grad)

    @property
    def tied(self) -> list[str]:
        module = next(iter(self.stages.values())).module
        return list(getattr(module, "aliases", {}).values())

    def _grad(self, name: str) -> Tensor:
        grad = self.masters[name].grad
        assert grad is not None
        return local_of(grad)


class _Step:
    """The tensors of one step as its actions make and use them."""

    def __init__(self, pipeline: Pipelined, batches: list[Batch], loss_of: LossOf, scale: float):
        self.p, self.batches, self.loss_of, self.scale = pipeline, batches, loss_of, scale
        self.total = torch.zeros((), device=pipeline.device)
        self.held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        """Input and output of a stage for a microbatch, between its forward and its backward."""
        self.later: dict[tuple[int, int], Any] = {}
        """What a weight-gradient action still needs."""

    def shape(self, message: Message) -> tuple[int, ...]:
        module: Any = next(iter(self.p.stages.values())).module
        shape: tuple[int, ...] = module.hidden_shape(self.batches[message.microbatch]["inputs"], self.p.sequence_cut)
        return shape

    def do(self, action: Action, last: bool) -> None:
        {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weights}[action.kind](action, last)

    def _receive(self, action: Action, kind: str, source_stage: int) -> Tensor:
        p = self.p
        began = p.spans.now()
        tensor = p.wire.receive(Message(kind, action.stage, action.microbatch), p.schedule.rank_of[source_stage])
        p.spans.add("recv", action.stage, action.microbatch, began)
        return tensor

    def _send(self, action: Action, tensor: Tensor) -> None:
        message = sent_by(action, self.p.schedule)
        assert message is not None
        self.p.wire.send(message, tensor)

    def _forward(self, action: Action, last: bool) -> None:
        p, (_, stage, m) = self.p, action
        hidden = None
        if stage > 0:
            hidden = self._receive(action, "F", stage - 1).detach().requires_grad_(torch.is_grad_enabled())
        began = p.spans.now()
        out = self.loss_of(p.stages[stage].module, self.batches[m], hidden)
        if stage == p.last:
            self.total += out.detach()
            out = out * self.scale
        else:
            self._send(action, out.detach())
        self.held[stage, m] = (hidden, out)
        p.spans.add("F", stage, m, began)

    def _grad_of_output(self, action: Action) -> Tensor | None:
        return None if action.stage == self.p.last else self._receive(action, "B", action.stage + 1)

    def _backward(self, action: Action, last: bool) -> None:
        p, (_, stage, m) = self.p, action
        grad = self._grad_of_output(action)
        began = p.spans.now()
        hidden, out = self.held.pop((stage, m))
        p.stages[stage].data.microbatch(last and not p.splits)
        torch.autograd.backward(out, grad)
        if hidden is not None:
            assert hidden.grad is not None
            self._send(action, hidden.grad)
        p.spans.add("B", stage, m, began)

    def _input(self, action: Action, last: bool) -> None:
        p, (_, stage, m) = self.p, action
        grad = self._grad_of_output(action)
        began = p.spans.now()
        hidden, out = self.held.pop((stage, m))
        p.stages[stage].data.microbatch(False)
        if hidden is None:  # nobody wants the gradient of tokens: the weights' action does the whole
            self.later[stage, m] = (out, grad)
        else:
            weights = list(p.stages[stage].module.parameters())
            grads = None if grad is None else [grad]
            (wanted,), groups = stage_backward_input([out], grads, [hidden], iter(weights))
            assert wanted is not None
            self._send(action, wanted)
            self.later[stage, m] = groups
        p.spans.add("I", stage, m, began)

    def _weights(self, action: Action, last: bool) -> None:
        p, (_, stage, m) = self.p, action
        began = p.spans.now()
        later = self.later.pop((stage, m))
        module: nn.Module = p.stages[stage].module
        if isinstance(later, tuple):
            torch.autograd.backward(later[0], later[1])
        else:
            stage_backward_weight(iter(list(module.parameters())), later)
        p.stages[stage].data.collect()
        p.spans.add("W", stage, m, began)
