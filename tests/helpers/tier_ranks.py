"""Runs whose states live in host memory or on disk, on one rank or several, with copies that are late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.comm.shards import like, local_of, shard_of
from weft.data.loader import Loader
from weft.data.open_dataset import open_dataset
from weft.job.schema import Job
from weft.memory.host_copies import Event, Pair, ThreadCopies
from weft.mesh import Mesh, connect
from weft.optim import streamed_optimizer as streamed
from weft.planner import Plan, make_plan
from weft.training.build import build_state
from weft.training.state import State
from weft.training.step import Stepper

LR = 1e-2


def delay_of() -> Callable[[], None]:
    """Waits that differ from copy to copy."""
    chance = random.Random(0)
    return lambda: time.sleep(chance.choice((0.0, 0.0, 0.0005)))


class LateCopies(ThreadCopies):
    """Copies that begin at random times. What was stored is overwritten with NaN, as if its memory were used again."""

    def __init__(self, device: torch.device):
        super().__init__(delay_of())

    def store(self, pairs: Sequence[Pair], after: Any) -> Event:
        done = super().store(pairs, after)

        def spoil() -> None:
            done.result()
            for _, source in pairs:
                source.view(torch.uint8).fill_(255)

        return self.outward.submit(spoil)


@dataclass
class Ran:
    """A run's losses, norms, and this rank's tensors after the last step."""

    figures: list[str]
    tensors: dict[str, Tensor]
    state: State

    def differences(self, other: Ran) -> list[str]:
        """In what two runs differ, bit by bit."""
        found = [] if self.figures == other.figures else [f"figures {self.figures} and {other.figures}"]
        found += sorted(self.tensors.keys() ^ other.tensors.keys())
        return found + [n for n, t in self.tensors.items() if n in other.tensors and not _same(t, other.tensors[n])]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def run(
    job: Job, plan: Plan, mesh: Mesh, steps: int = 4, not_finite: int | None = None, start: State | None = None,
    late: bool = True, evaluate: bool = False,
) -> Ran:  # fmt: skip
    """Some steps of a job, from the state of another run if there is one. One step may be not finite. With
    `evaluate`, the batch of each step is evaluated after it."""
    streamed.make_copies = LateCopies if late else lambda device: ThreadCopies()
    streamed.make_weight_copies = (lambda device: ThreadCopies(delay_of())) if late else streamed.make_copies
    state = build_state(job, plan, mesh)
    if start is not None:
        into = state.loadable_tensors(saved_world=0)
        for name, tensor in start.tensors().items():
            if name in into:
                with torch.no_grad():
                    local_of(into[name]).copy_(local_of(tensor))
        state.restore(into, start.counts())
    stepper = Stepper(job, plan, mesh, state)
    loader = Loader(
        open_dataset(job), seed=job.train.seed, global_batch=job.train.global_batch, microbatch=plan.microbatch,
        dp_rank=mesh.dp_rank(plan), dp_size=plan.dp, prefetch=0, start_step=state.step, start_sample=state.samples,
    )  # fmt: skip
    figures = []
    for _, batches in zip(range(steps), loader, strict=False):
        scale = state.scale.value
        state.scale.value = float("inf") if state.step == not_finite else scale
        grads = stepper.gradients(batches)
        state.scale.value = scale
        norm, taken = stepper.update(grads, stepper.learning_rate())
        figures.append(f"{float(grads.loss)!r} {float(norm)!r} {taken}")
        if evaluate:
            figures.append(f"{stepper.evaluate([batches])!r}")
    loader.close()
    tensors = {n: t.clone() for n, t in state.shards().items() if not n.startswith("random")}
    weights = getattr(state.optimizers, "weights", None)
    compute = {
        f"compute.{n}": (local_of(t.detach()) if weights is None else weights.compute_home(n)).clone()
        for n, t in state.model.compute_params.items()
    }
    return Ran(figures, tensors | compute, state)


def updates(job: Job, states: str, steps: int, start: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """On ranks: whole tensors after some updates with gradients that are the same in every layout, from the tensors of
    another run if there are some."""
    job, plan = make_plan(job)
    mesh = connect(plan, job.comm.timeout_s)
    state = build_state(job, replace(plan, states=states, host_share=0.5), mesh)
    if start is not None:
        into = state.loadable_tensors(saved_world=0)
        with torch.no_grad():
            for name, tensor in into.items():
                local_of(tensor).copy_(start[name][shard_of(tensor).box])
        state.restore(into, {**state.counts(), "step": 2})
    for _ in range(steps):
        for number, leaf in enumerate(state.model.grad_params.values()):
            chance = torch.Generator().manual_seed(1000 * state.step + number)
            grad = torch.randn(leaf.shape, generator=chance)
            leaf.grad = like(grad[shard_of(leaf).box].to(leaf.dtype).contiguous(), leaf)
        state.optimizers.step_number = state.step
        state.optimizers.step(LR)
        state.step += 1
    found = {n: t for n, t in state.tensors().items() if n.startswith(("model.", "optim."))}
    return {n: shard_of(t).whole(local_of(t)).clone() for n, t in found.items()}


def compare(planned: tuple[Job, Plan], changes: dict[str, Any], disk: str) -> list[str]:
    """On ranks: what differs between a resident run and one with these fields of the plan."""
    job, plan = planned
    mesh = connect(plan, job.comm.timeout_s)
    resident = run(job, plan, mesh)
    tiered = run(job, replace(plan, disk=disk, **changes), mesh)
    assert isinstance(tiered.state.optimizers, streamed.StreamedOptimizers)
    moved = sum(tiered.state.optimizers.moved.values())
    return resident.differences(tiered) + ([] if moved else ["nothing was moved"])
