"""Functions that tests of experts run on ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from helpers import on_ranks
from weft.data.loader import to_device
from weft.job.schema import Job
from weft.planner.advice.expert_placement import better_order
from weft.training.expert_rebalance import rebalance


@dataclass(frozen=True)
class Loads:
    """What the routers of a run did."""

    tables: list[list[list[float]]]
    """By step, block and expert, as MixtureOfExperts.tally has it."""
    losses: list[float]
    norms: list[float]
    moved: Counter[str]
    """Bytes that this rank handed over on the ep axis, by kind."""
    calls: Counter[str]
    held: int
    """Elements of experts that this rank's optimizer updates."""
    buffers: dict[str, Tensor]


def loads(job: Job | on_ranks.Planned, steps: int, favourite: int | None = None) -> Loads:
    """Train a few steps; with a favourite, every token wants that expert first."""
    job, plan, mesh, stepper, loader = on_ranks.begin(job)
    spread_model = stepper.state.model
    load = spread_model.load
    assert load is not None
    if favourite is not None:
        for part in load.parts.values():
            assert part.bias is not None
            part.bias[favourite] = 100.0
    tables, losses, norms = [], [], []
    for _, batches in zip(range(steps), loader, strict=False):
        grads = stepper.gradients([to_device(b, mesh.device) for b in batches])
        tables.append(load.figures().tolist())
        norm, _ = stepper.update(grads, stepper.learning_rate())
        total = grads.loss.double() / plan.tp
        if mesh.everyone is not None:
            mesh.everyone.all_reduce(total)
        losses.append(float(total / grads.count))
        norms.append(float(norm))
        assert all(
            x.grad is None or bool(torch.isfinite(on_ranks.local_of(x.grad)).all())
            for x in spread_model.grad_params.values()
        )
    axis = mesh.axis("ep")
    moved, calls = (axis.bytes, axis.calls) if axis else (Counter[str](), Counter[str]())
    held = sum(on_ranks.local_of(m).numel() for n, m in spread_model.master_params.items() if ".experts." in n)
    return Loads(tables, losses, norms, moved, calls, held, {n: b.clone() for n, b in spread_model.buffers().items()})


@dataclass(frozen=True)
class Moved:
    """Some steps, perhaps with experts that changed places after the first."""

    losses: list[float]
    norms: list[float]
    order: list[int]
    """Of the first block's experts, as the load suggests it."""
    counts: list[float]
    """Tokens of the first block's experts in the last step."""
    weights: dict[str, Tensor]
    """This rank's shards of the experts after the last step."""
    copies: int


def move_experts(job: Job | on_ranks.Planned, how: str) -> Moved:
    """Train a step, place experts anew as its load suggests, and train another.

    `how` is still, moved, copied (every rank computes some of the others' experts, whether it pays or not), or both
    (what pays where copies cost nothing).
    """
    job, plan, mesh, stepper, loader = on_ranks.begin(job)
    state = stepper.state
    load = state.model.load
    assert load is not None and job.model.experts is not None
    count, order = job.model.experts.count, list[int]()
    losses, norms = [], []
    for i, batches in zip(range(2), loader, strict=False):
        grads = stepper.gradients(batches)
        counts = load.figures()[0, :-3].tolist()
        norm, _ = stepper.update(grads, stepper.learning_rate())
        total = grads.loss.double() / plan.tp
        assert mesh.everyone is not None
        mesh.everyone.all_reduce(total)
        losses.append(float(total / grads.count))
        norms.append(float(norm))
        if i == 0:
            order = better_order(load.since[0, :-3].tolist(), plan.ep)
        if i == 0 and how == "copied":  # one expert is everywhere, one on two ranks; the last rank borrows one
            home = count // plan.ep
            pairs = {(0, r) for r in range(1, plan.ep)} | {(count - 1, 0), (1, 1)}
            load.place({block: tuple((e, r) for e, r in pairs if e // home != r) for block in load.blocks})
            state.restore({}, state.counts())  # as after a fault
        elif i == 0 and how != "still":
            room = 2 if how == "both" else 0
            rebalance(state, replace(plan, ep_rebalance=-1.0, ep_copies=room, ep_copy_rows=0.0))
    weights = {
        n: on_ranks.local_of(m).detach().clone() for n, m in state.model.master_params.items() if ".experts." in n
    }
    return Moved(losses, norms, order, counts, weights, sum(map(len, load.copies.values())))
