"""Pipeline parallelism: an executor that follows a schedule's list of actions, and the messages between stages.

The lists come from planner/schedules/known_schedules.py, and the simulator reads the same ones. Each stage may be cut
over tp and dp_shard and replicated over dp_replicate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.comm.axis import Axis
from weft.comm.shards import local_of, on_flat_
from weft.parallel.data.compression import Compressor
from weft.parallel.data.data_parallel import nothing
from weft.parallel.expert.expert_load import ExpertLoad
from weft.parallel.pipeline.boundary import Boundary, Layout, message_layout, pack, unpack
from weft.parallel.pipeline.messages import Message, StageLinks, Transfer, sent_by, transfers_of
from weft.parallel.pipeline.split_backward import WeightPart, backward_input, backward_weights
from weft.parallel.pipeline.stage_boundaries import StageBoundaries, check_boundary
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
        ties: dict[str, tuple[int, int]] | None = None,
    ):  # fmt: skip
        """`ties` are the weights that two stages share, by name. `at_once` are the stages with recomputed blocks. A
        backward pass through a block recomputes it, so the gradients of inputs and weights are computed together, and
        the schedule's W has nothing to do."""
        self.at_once, self.load = at_once, load
        self.stages, self.schedule, self.axis = stages, schedule, axis
        self.device = device
        self.links = StageLinks(axis, device)
        self.boundaries = StageBoundaries(stages, schedule, self.links, sequence_cut, dtype)
        self.transfers = transfers_of(schedule, axis.rank)
        self.evaluation: dict[int, tuple[Schedule, tuple[Transfer, ...]]] = {}
        """By the number of batches: the schedule of an evaluation and its transfers."""
        self.spans = ActionTimes(device)
        self.last = schedule.stages - 1
        self.ties = ties or {}
        self.master_params: dict[str, Tensor] = {}
        self.compute_params: dict[str, Tensor] = {}
        self.twins: list[tuple[str, Tensor]] = []
        """Tied weights that this rank holds a second time, in its last stage: copies of the master weight, which the
        optimizer, checkpoints and proofs do not use."""
        self.twin_compute_params: list[tuple[str, Tensor]] = []
        self.counted: list[Tensor] = []
        for index in sorted(stages):
            for name, master in stages[index].master_params.items():
                tied = name in stages[index].aliases.values()
                twin = tied and name in self.master_params
                copy = stages[index].compute_params.get(name)
                if twin:
                    self.twins.append((name, master))
                    self.twin_compute_params += [] if copy is None else [(name, copy)]
                else:
                    self.master_params[name] = master
                    self.compute_params |= {} if copy is None else {name: copy}
                if not tied:
                    self.counted.append(master)
        self.splits = any(a.kind in "IW" for a in schedule.actions[axis.rank])

    @property
    def parts(self) -> list[SpreadModel]:
        """The stages on this rank."""
        return list(self.stages.values())

    @property
    def squares_by_id(self) -> dict[int, Tensor]:
        """Sums of squares of gradients in host memory: a pipeline has none."""
        return {}

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
        self, batches: list[Batch], loss_of: LossOf, scale: float, overlap_callback: Callable[[], None] = nothing
    ) -> Tensor:
        """One step of the schedule: the gradients of loss · scale. The loss is where the last stage is, 0 elsewhere."""
        if len(batches) != self.schedule.microbatches:
            raise RuntimeError(f"{len(batches)} microbatches for a schedule of {self.schedule.microbatches}")
        self.load.begin(scale)
        step = _Step(self, batches, loss_of, scale)
        actions = self.schedule.actions[self.axis.rank]
        final = {a.stage: i for i, a in enumerate(actions) if a.kind in ("B", "W")}
        self.links.begin(self.transfers, step.layout)
        for stage in self.parts:
            stage.begin(scale)
            stage.data.begin_pipeline(self.splits)
        for i, action in enumerate(actions):
            step.do(action, last=final[action.stage] == i)
        self.links.end()
        for stage in self.parts:
            stage.finish(overlap_callback)
        self._sum_tied()
        self.load.gather()
        return step.total

    @torch.no_grad()
    def evaluate(self, steps: Iterable[list[Batch]], loss_of: LossOf) -> Tensor:
        """The summed loss of the batches of some steps where the last stage is, 0 elsewhere."""
        for stage in self.parts:
            stage.module.eval()
        totals = [self._forward(batches, loss_of) for batches in steps]
        for stage in self.parts:
            stage.data.after_evaluation()
            stage.module.train()
        return torch.stack(totals).sum(0)

    def _forward(self, batches: list[Batch], loss_of: LossOf) -> Tensor:
        schedule, transfers = self._forward_only(len(batches))
        step = _Step(self, batches, loss_of, 1.0)
        self.links.begin(transfers, step.layout)
        for action in schedule.actions[self.axis.rank]:
            step.do(action, last=False)
            step.held.clear()
        self.links.end()
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
            for name, twin in held:
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
        """A weight that two stages share gets the sum of their gradients, wherever it is updated."""
        for name, twin in self.twins:
            _grad(self.master_params[name]).add_(_grad(twin))
        for name, (first, second) in sorted(self.ties.items()):
            owner, copy = self.schedule.rank_of[first], self.schedule.rank_of[second]
            if owner != copy and self.axis.rank in (owner, copy) and name in self.master_params:
                grad = _grad(self.master_params[name])
                grad += self.links.exchange(copy if self.axis.rank == owner else owner, grad).view_as(grad)
        if shared := [_grad(self.master_params[name]) for name in self.shared if name in self.master_params]:
            on_flat_(shared, self.axis.all_reduce)

    @property
    def shared(self) -> tuple[str, ...]:
        """Small weights that every stage holds."""
        return tuple(getattr(self.parts[0].module, "shared", ()))


def _grad(master: Tensor) -> Tensor:
    assert master.grad is not None
    return local_of(master.grad)


class _Step:
    """The tensors of one step as its actions make and use them."""

    def __init__(self, pipeline: Pipelined, batches: list[Batch], loss_of: LossOf, scale: float):
        self.p, self.batches, self.loss_of, self.scale = pipeline, batches, loss_of, scale
        self.total = torch.zeros((), device=pipeline.device)
        self.held: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        """Inputs and outputs of a stage that have gradients, for a microbatch, between its forward and its backward."""
        self.later: dict[tuple[int, int], list[WeightPart]] = {}
        """The weights whose gradients are still to be computed."""
        self.boundaries = [pipeline.boundaries.of(batch, loss_of) for batch in batches]

    def layouts(self, message: Message) -> tuple[Layout, ...]:
        """The tensors of a message: activations for a stage, or the gradients of what a stage gave."""
        boundaries = self.boundaries[message.microbatch]
        return boundaries[message.to - 1].tensors if message.kind == "F" else boundaries[message.to].trained

    def layout(self, message: Message) -> Layout:
        return message_layout(self.layouts(message))

    def do(self, action: Action, last: bool) -> None:
        kinds = {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weights}
        with self.p.axis.meter.range(f"weft.stage {action.stage} {action.kind} {action.microbatch}"):
            kinds[action.kind](action, last)

    def _receive(self, action: Action, kind: str, source_stage: int) -> list[Tensor]:
        p = self.p
        began = p.spans.now()
        message = Message(kind, action.stage, action.microbatch)
        tensor = p.links.receive(message, p.schedule.rank_of[source_stage])
        p.spans.add("recv", action.stage, action.microbatch, began)
        return unpack(tensor, self.layouts(message))

    def _send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        message = sent_by(action, self.p.schedule)
        assert message is not None
        self.p.links.send(message, self.p.schedule.rank_of[message.to], pack(tensors))

    def _forward(self, action: Action, last: bool) -> None:
        p, (_, stage, m) = self.p, action
        trained, hidden = [], None
        if stage > 0:
            received = [t.detach() for t in self._receive(action, "F", stage - 1)]
            trained = [t.requires_grad_(torch.is_grad_enabled()) for t in received if t.is_floating_point()]
            hidden = self.boundaries[m][stage - 1].value(received)
        began = p.spans.now()
        out = self.loss_of(p.stages[stage].module, self.batches[m], hidden)
        if stage == p.last:
            self.total = self.total + out.detach()
            self.held[stage, m] = (trained, [out * self.scale])
        else:
            found, tensors = Boundary.of(out)
            check_boundary(self.boundaries[m][stage], found, stage)
            self._send(action, [t.detach() for t in tensors])
            self.held[stage, m] = (trained, [t for t in tensors if t.is_floating_point()])
        p.spans.add("F", stage, m, began)

    def _outputs(self, action: Action) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
        """What a backward pass begins with: the stage's inputs, its outputs and their gradients."""
        grads: Sequence[Tensor | None] = [None]
        if action.stage != self.p.last:
            grads = self._receive(action, "B", action.stage + 1)
        hidden, outs = self.held.pop((action.stage, action.microbatch))
        pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
        return hidden, [out for out, _ in pairs], [grad for _, grad in pairs]

    def _backward(self, action: Action, last: bool) -> None:
        p, (_, stage, m) = self.p, action
        hidden, outs, grads = self._outputs(action)
        began = p.spans.now()
        p.stages[stage].data.microbatch(last and not p.splits)
        if outs:
            torch.autograd.backward(outs, grads)
        if stage > 0:
            self._send(action, [torch.zeros_like(h) if h.grad is None else h.grad for h in hidden])
        p.spans.add(action.kind, stage, m, began)

    def _input(self, action: Action, last: bool) -> None:
        p, (_, stage, m) = self.p, action
        if stage in p.at_once:
            return self._backward(action, last)
        hidden, outs, grads = self._outputs(action)
        began = p.spans.now()
        p.stages[stage].data.microbatch(False)
        found: list[Tensor | None] = [None] * len(hidden)
        self.later[stage, m] = []
        if outs:
            found, self.later[stage, m] = backward_input(outs, grads, hidden, p.stages[stage].module.parameters())
        if stage > 0:
            pairs = zip(hidden, found, strict=True)
            self._send(action, [torch.zeros_like(h) if grad is None else grad for h, grad in pairs])
        p.stages[stage].data.collect()
        p.spans.add("I", stage, m, began)

    def _weights(self, action: Action, last: bool) -> None:
        p, (_, stage, m) = self.p, action
        began = p.spans.now()
        if stage not in p.at_once:
            backward_weights(self.later.pop((stage, m)))
        p.stages[stage].data.collect()
        p.spans.add("W", stage, m, began)
