"""Pipeline parallelism: an executor that follows a schedule's list of actions, and the messages between stages.

The lists come from planner/schedules/registry.py, and the simulator reads the same ones. Each stage may be cut over tp
and dp_shard and replicated over dp_replicate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.comm.axis import Axis
from weft.comm.shards import local_of
from weft.parallel.data.compression import Compressor
from weft.parallel.data.data_parallel import nothing
from weft.parallel.expert.load import ExpertLoad
from weft.parallel.pipeline.messages import Message, StageLinks, Transfer, sent_by, transfers_of
from weft.parallel.pipeline.split_backward import WeightPart, backward_input, backward_weights
from weft.parallel.spread_model import Batch, LossOf, SpreadModel
from weft.planner.schedules.actions import Action, Schedule


class ActionTimes:
    """When each action of one step began and ended; recorded only if `wanted`."""

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
    """The stages of this rank and the schedule they follow, with the interface of a SpreadModel."""

    tables = None
    """Models with embedding tables have no stages."""

    def __init__(
        self, stages: dict[int, SpreadModel], schedule: Schedule, axis: Axis, device: torch.device, dtype: torch.dtype,
        sequence_cut: int, load: ExpertLoad, at_once: frozenset[int] = frozenset(),
    ):  # fmt: skip
        """`at_once` are the stages with recomputed blocks. A backward pass through a block recomputes it, so the
        gradients of inputs and weights are computed together, and the schedule's W has nothing to do."""
        self.at_once, self.load = at_once, load
        self.stages, self.schedule, self.axis, self.sequence_cut = stages, schedule, axis, sequence_cut
        self.device = device
        self.links = StageLinks(axis, device, dtype)
        self.transfers = transfers_of(schedule, axis.rank)
        self.evaluation: dict[int, tuple[Schedule, tuple[Transfer, ...]]] = {}
        """By the number of batches: the schedule of an evaluation and its transfers."""
        self.spans = ActionTimes(device)
        self.last = schedule.stages - 1
        self.master_params: dict[str, Tensor] = {}
        self.compute_params: dict[str, Tensor] = {}
        self.twins: dict[str, Tensor] = {}
        """Tied weights that this rank holds a second time, in its last stage: copies of the master weight, which the
        optimizer, checkpoints and proofs do not use."""
        self.twin_compute_params: dict[str, Tensor] = {}
        self.counted: list[Tensor] = []
        for index in sorted(stages):
            for name, master in stages[index].master_params.items():
                tied = name in stages[index].aliases.values()
                twin = tied and name in self.master_params
                (self.twins if twin else self.master_params)[name] = master
                if (copy := stages[index].compute_params.get(name)) is not None:
                    (self.twin_compute_params if twin else self.compute_params)[name] = copy
                if not tied:
                    self.counted.append(master)
        self.splits = any(a.kind in "IW" for a in schedule.actions[axis.rank])

    @property
    def parts(self) -> list[SpreadModel]:
        """The stages on this rank."""
        return list(self.stages.values())

    @property
    def grad_params(self) -> dict[str, Tensor]:
        """The master weights themselves: a pipeline sums over microbatches."""
        return self.master_params

    @property
    def frozen(self) -> dict[str, Tensor]:
        return {n: p for stage in self.parts for n, p in stage.frozen.items()}

    @property
    def compressors(self) -> list[Compressor]:
        return [c for stage in self.parts for c in stage.compressors]

    def maxima(self) -> dict[str, Tensor]:
        return {n: t for stage in self.parts for n, t in stage.maxima().items()}

    def restore_maxima(self) -> None:
        for stage in self.parts:
            stage.restore_maxima()

    def residuals(self) -> dict[str, Tensor]:
        return {n: t for stage in self.parts for n, t in stage.residuals().items()}

    def load_residuals(self, held: dict[str, Tensor]) -> None:
        for stage in self.parts:
            stage.load_residuals(held)

    def buffers(self) -> dict[str, Tensor]:
        return {n: b for stage in self.parts for n, b in stage.buffers().items()}

    def backward(
        self, batches: list[Batch], loss_of: LossOf, scale: float, meanwhile: Callable[[], None] = nothing
    ) -> Tensor:
        """One step of the schedule: the gradients of loss · scale. The loss is where the last stage is, 0 elsewhere."""
        if len(batches) != self.schedule.microbatches:
            raise RuntimeError(f"{len(batches)} microbatches for a schedule of {self.schedule.microbatches}")
        self.load.begin(scale)
        step = _Step(self, batches, loss_of, scale)
        actions = self.schedule.actions[self.axis.rank]
        final = {a.stage: i for i, a in enumerate(actions) if a.kind in ("B", "W")}
        self.links.begin(self.transfers, step.shape)
        for stage in self.parts:
            stage.begin(scale)
            stage.data.begin_pipeline(self.splits)
        for i, action in enumerate(actions):
            step.do(action, last=final[action.stage] == i)
        self.links.end()
        for stage in self.parts:
            stage.finish(meanwhile)
        self._sum_tied()
        self.load.gather()
        return step.total

    @torch.no_grad()
    def evaluate(self, batches: list[Batch], loss_of: LossOf) -> Tensor:
        """The summed loss of some batches where the last stage is, 0 elsewhere."""
        for stage in self.parts:
            stage.module.eval()
        schedule, transfers = self._forward_only(len(batches))
        step = _Step(self, batches, loss_of, 1.0)
        self.links.begin(transfers, step.shape)
        for action in schedule.actions[self.axis.rank]:
            step.do(action, last=False)
            step.held.clear()
        self.links.end()
        for stage in self.parts:
            stage.data.after_evaluation()
            stage.module.train()
        return step.total

    def _forward_only(self, count: int) -> tuple[Schedule, tuple[Transfer, ...]]:
        if count not in self.evaluation:
            of, ranks = self.schedule, range(self.axis.size)
            lists = [tuple(Action("F", s, m) for m in range(count) for s in of.stages_of(rank)) for rank in ranks]
            schedule = replace(of, microbatches=count, actions=tuple(lists))
            self.evaluation[count] = schedule, transfers_of(schedule, self.axis.rank)
        return self.evaluation[count]

    def zero_grad(self) -> None:
        for stage in self.parts:
            stage.zero_grad()

    def after_step(self, taken: bool | Tensor = True) -> None:
        """Call after a step. A weight that is held twice is updated once, and then copied."""
        for stage in self.parts:
            stage.after_step(taken)
        self.load.after_step(taken)
        self._renew_twins()

    @torch.no_grad()
    def _renew_twins(self) -> None:
        for held in (self.twins, self.twin_compute_params):
            for name, twin in held.items():
                local_of(twin).copy_(local_of(self.master_params[name]))

    def figures(self) -> Tensor:
        return self.load.figures()

    def metrics(self, figures: list[float], tokens: int) -> dict[str, Any]:
        return self.load.metrics(figures, tokens)

    def refresh(self) -> None:
        self._renew_twins()
        for stage in self.parts:
            stage.refresh()

    def _sum_tied(self) -> None:
        """A weight that the first and the last stage share gets the sum of their gradients, wherever it is updated."""
        owner, copy = self.schedule.rank_of[0], self.schedule.rank_of[self.last]
        for name, twin in self.twins.items():
            _grad(self.master_params[name]).add_(_grad(twin))
        if owner != copy and self.axis.rank in (owner, copy):
            for name in sorted(set(self.tied) & self.master_params.keys()):
                grad = _grad(self.master_params[name])
                grad += self.links.exchange(copy if self.axis.rank == owner else owner, grad).view_as(grad)

    @property
    def tied(self) -> list[str]:
        module = self.parts[0].module
        return list(getattr(module, "aliases", {}).values())


def _grad(master: Tensor) -> Tensor:
    assert master.grad is not None
    return local_of(master.grad)


class _Step:
    """The tensors of one step as its actions make and use them."""

    def __init__(self, pipeline: Pipelined, batches: list[Batch], loss_of: LossOf, scale: float):
        self.p, self.batches, self.loss_of, self.scale = pipeline, batches, loss_of, scale
        self.total = torch.zeros((), device=pipeline.device)
        self.held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        """Input and output of a stage for a microbatch, between its forward and its backward."""
        self.later: dict[tuple[int, int], list[WeightPart]] = {}
        """The weights whose gradients are still to be computed."""

    def shape(self, message: Message) -> tuple[int, ...]:
        module: Any = self.p.parts[0].module
        shape: tuple[int, ...] = module.hidden_shape(self.batches[message.microbatch]["inputs"], self.p.sequence_cut)
        return shape

    def do(self, action: Action, last: bool) -> None:
        kinds = {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weights}
        with self.p.axis.meter.range(f"weft.stage {action.stage} {action.kind} {action.microbatch}"):
            kinds[action.kind](action, last)

    def _receive(self, action: Action, kind: str, source_stage: int) -> Tensor:
        p = self.p
        began = p.spans.now()
        tensor = p.links.receive(Message(kind, action.stage, action.microbatch), p.schedule.rank_of[source_stage])
        p.spans.add("recv", action.stage, action.microbatch, began)
        return tensor

    def _send(self, action: Action, tensor: Tensor) -> None:
        message = sent_by(action, self.p.schedule)
        assert message is not None
        self.p.links.send(message, self.p.schedule.rank_of[message.to], tensor)

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
        p.spans.add(action.kind, stage, m, began)

    def _input(self, action: Action, last: bool) -> None:
        p, (_, stage, m) = self.p, action
        if stage in p.at_once:
            return self._backward(action, last)
        grad = self._grad_of_output(action)
        began = p.spans.now()
        hidden, out = self.held.pop((stage, m))
        p.stages[stage].data.microbatch(False)
        found, self.later[stage, m] = backward_input(out, grad, hidden, p.stages[stage].module.parameters())
        if found is not None:
            self._send(action, found)
        p.stages[stage].data.collect()
        p.spans.add("I", stage, m, began)

    def _weights(self, action: Action, last: bool) -> None:
        p, (_, stage, m) = self.p, action
        began = p.spans.now()
        if stage not in p.at_once:
            backward_weights(self.later.pop((stage, m)))
        p.stages[stage].data.collect()
        p.spans.add("W", stage, m, began)
