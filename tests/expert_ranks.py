"""What tests of experts let ranks do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import on_ranks
import torch
from torch import Tensor

from weft.data.loader import to_device
from weft.job.schema import Job
from weft.train.rebalance import better_order, rebalance


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


def loads(job: Job, steps: int, favourite: int | None = None) -> Loads:
    """Train a few steps; with a favourite, every token wants that expert first."""
    job, plan, mesh, stepper, loader = on_ranks.begin(job)
    woven = stepper.state.woven
    load = woven.load
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
            x.grad is None or bool(torch.isfinite(on_ranks.local_of(x.grad)).all()) for x in woven.leaves.values()
        )
    axis = mesh.axis("ep")
    moved, calls = (axis.bytes, axis.calls) if axis else (Counter[str](), Counter[str]())
    held = sum(on_ranks.local_of(m).numel() for n, m in woven.masters.items() if ".experts." in n)
    return Loads(tables, losses, norms, moved, calls, held, {n: b.clone() for n, b in woven.buffers().items()})


@dataclass(frozen=True)
class Moved:
    """Two steps, perhaps with experts that changed places between them."""

    losses: list[float]
    norms: list[float]
    order: list[int] | None
    counts: list[float]
    """Tokens of the first block's experts in the second step."""


def move_experts(job: Job, move: bool) -> Moved:
    """Train a step, move the first block's experts as its load suggests, and train another."""
    job, plan, mesh, stepper, loader = on_ranks.begin(job)
    state, order = stepper.state, None
    load = state.woven.load
    assert load is not None
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
        if move and i == 0:
            order = better_order(load.since[0, :-3].tolist(), plan.ep)
            rebalance(state, plan.ep, -1.0)  # whether it pays or not
    return Moved(losses, norms, order, counts)
