"""The run of a proof: a few steps of a job in one layout, with every gradient, weight and moment in whole tensors."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.axis import Axis
from weft.comm.shards import local_of, shard_of
from weft.data.loader import Batch, Loader, to_device
from weft.data.open_dataset import open_dataset
from weft.job.extensions import import_extensions
from weft.job.schema import Job
from weft.mesh import Mesh, connect
from weft.models.batch_norm import GlobalBatchNorm
from weft.planner import Plan, make_plan
from weft.training.build import build_state
from weft.training.state import State
from weft.training.step import Stepper
from weft.verify.compare import Trace, moments_of
from weft.verify.random_operators_internals import MeanDraws, RandomStates
from weft.verify.routing import RoutingReplay


@dataclass(frozen=True)
class Variant:
    """How a run of a proof differs from the run of the job."""

    round_weights: bool = False
    """Change the first weights in their last bits."""
    in_step: bool = False
    """Begin each step from the weights of the reference run, which writes them. Rounding does not grow then from step
    to step: a ReLU whose input is almost 0 passes a gradient in one run and none in another."""
    mean_draws: bool = False
    """Replace the random numbers of a user module by their means."""


AS_IT_IS, IN_STEP = Variant(), Variant(in_step=True)


def trace(job: Job, steps: int, folder: str, reference: str | None = None, variant: Variant = AS_IT_IS) -> None:
    """Run a few steps on the ranks of this call and write the Trace, in whole tensors, to folder/trace.pt.

    `reference` is the folder of the reference run; without one this is it, and its routing is written too.
    """
    import_extensions(job.extensions)
    job, plan = make_plan(job)
    trace_on(connect(plan, job.comm.timeout_s), job, plan, steps, folder, reference, variant)


def trace_on(
    mesh: Mesh, job: Job, plan: Plan, steps: int, folder: str, reference: str | None = None,
    variant: Variant = AS_IT_IS,
) -> None:  # fmt: skip
    """trace() on a mesh that exists already."""
    began = time.perf_counter()
    state = build_state(job, plan, mesh)
    if variant.round_weights:
        change_last_bits(state, job.train.seed)
    leader = WeightsOfSteps(folder, reference) if variant.in_step else None
    stepper = Stepper(job, plan, mesh, state)
    replay = RoutingReplay(state.model.load, folder, reference)
    losses, norms, gradients = [], [], []
    draws = MeanDraws(getattr(state.model, "module", None) if reference is None else None)
    generators = RandomStates(mesh.device)
    tables = state.model.tables
    start = whole_weights(state)
    loader = Loader(
        open_dataset(job), seed=job.train.seed, global_batch=job.train.global_batch, microbatch=plan.microbatch,
        dp_rank=mesh.dp_rank(plan), dp_size=plan.dp, prefetch=0, drop_last=job.data.drop_last,
    )  # fmt: skip
    batches: list[Batch] = []
    for number, batches in zip(range(steps), loader, strict=False):
        if leader is not None and number > 0:
            leader.before_step(number, state)
        local = [to_device(b, mesh.device) for b in batches]
        with draws if variant.mean_draws else generators if job.model.module else nullcontext():
            grads = stepper.gradients(local)
        factor = grads.factor.cpu()
        grad_params = {n: x for n, x in state.model.grad_params.items() if x.grad is not None}
        held = {n: whole(x.grad) for n, x in grad_params.items()}
        held |= {} if tables is None else {n: whole(g) for n, g in tables.gradients().items()}
        gradients.append({n: g.float() * factor for n, g in held.items()})
        norm, _ = stepper.update(grads, stepper.learning_rate())
        total = grads.loss.double() / plan.tp
        if mesh.everyone is not None:
            mesh.everyone.all_reduce(total)
        losses.append(float(total / grads.count))
        norms.append(float(norm))
    state.agree()
    buffers = {n: agreed(b, mesh) for n, b in state.model.buffers().items()} if job.model.module else {}
    held_out = [to_device(b, mesh.device) for b in next(loader, batches)]
    with draws if variant.mean_draws else nullcontext():
        evaluation = stepper.evaluate([held_out])["val_loss"]
    parameters = whole_weights(state)
    if leader is not None:
        parameters = leader.with_differences(parameters)
    states = state.optimizers.state() | ({} if tables is None else tables.state())
    moments = moments_of({n: whole(t).float() for n, t in states.items()})
    for held in (*gradients, start, parameters, moments, buffers):
        join_stages(held, mesh)
        join_tensors(held, mesh.everyone if tables is not None or plan.towers else None, mesh)
    routing = replay.end(mesh)
    module = getattr(state.model, "module", None)  # a pipeline has stages
    batch_norms = module is not None and any(isinstance(part, GlobalBatchNorm) for part in module.modules())
    if mesh.rank == 0:
        seconds = time.perf_counter() - began
        Trace(
            losses, norms, gradients, start, parameters, moments, seconds, routing, batch_norms, evaluation, buffers,
            list(generators.changed), list(draws.operators), list(draws.kept),
        ).save(Path(folder))  # fmt: skip
    mesh.barrier()


def change_last_bits(state: State, seed: int) -> None:
    """Multiply every trained weight by 1 or 1 ± 2^-21, at random. Layouts add the products of a layer in another order,
    which changes its outputs by a few units in the last place; this does the same."""
    generator = torch.Generator().manual_seed(seed)
    masters = state.optimizers.masters()
    with torch.no_grad():
        for master in masters.values():
            signs = torch.randint(-1, 2, master.shape, generator=generator).to(master)
            master.mul_(1 + signs * 2**-21)
    state.optimizers.restore(masters)


def agreed(buffer: Tensor, mesh: Mesh) -> Tensor:
    """A buffer on the host, as the mean over ranks that compute parts of the same samples: if they differ, none of them
    is that of one process."""
    value = buffer.detach()
    axes = [axis for name in ("cp", "tp") if (axis := mesh.axis(name)) is not None]
    for axis in axes if value.is_floating_point() else ():
        value = (axis.all_reduce(value.double()) / axis.size).to(value.dtype)
    return value.cpu().clone()


class WeightsOfSteps:
    """The weights before each step after the first, which the reference run writes and a run in step with it takes."""

    def __init__(self, folder: str, reference: str | None):
        self.folder, self.follows = Path(reference or folder), reference is not None
        self.differences: dict[str, Tensor] = {}
        """The sums over the steps of what the updates of this run differed by."""

    def before_step(self, number: int, state: State) -> None:
        """Write the weights, or replace them by those of the reference run. Collective."""
        own, file = whole_weights(state), self.folder / f"weights-{number}.pt"
        if not self.follows:
            torch.save(own, file)
            return
        weights = torch.load(file, weights_only=True, mmap=True)
        masters = state.optimizers.masters()  # not the rows of tables, which are updated by themselves
        with torch.no_grad():
            for name, master in masters.items():
                self.differences[name] = self.differences.get(name, 0.0) + (own[name].double() - weights[name])
                local_of(master).copy_(weights[name][shard_of(master).box])
        state.optimizers.restore({f"model.{n}": m for n, m in masters.items()})
        state.model.refresh()

    def with_differences(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """The last weights and all differences before them, so that no wrong update is lost."""
        return {n: (p.double() + self.differences[n]).float() if n in self.differences else p
                for n, p in parameters.items()}  # fmt: skip


def whole_weights(state: State) -> dict[str, Tensor]:
    """The trained weights of which this rank holds a part."""
    tables = state.model.tables
    held = state.optimizers.masters() | ({} if tables is None else tables.weights())
    return {n: whole(m) for n, m in held.items()}


def join_stages(held: dict[str, Tensor], mesh: Mesh) -> None:
    """Bring the weights of every stage of a pipeline together."""
    join_tensors(held, mesh.axis("pp"), mesh)


def join_tensors(held: dict[str, Tensor], axis: Axis | None, mesh: Mesh) -> None:
    """Add the tensors of all ranks of an axis, by name. Collective over the mesh."""
    if axis is None:
        return
    described = {n: (str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in held.items()}
    everyone = mesh.all_gather_json(described)
    for source, rank in enumerate(dist.get_process_group_ranks(axis.group)):
        for dtype in sorted({dtype for dtype, _ in everyone[rank].values()}):
            shapes = {n: shape for n, (kind, shape) in everyone[rank].items() if kind == dtype}
            sizes = [prod(shape) for shape in shapes.values()]
            flat = torch.empty(sum(sizes), dtype=getattr(torch, dtype))
            if axis.rank == source:
                flat = torch.cat([held[n].reshape(-1) for n in shapes])
            flat = axis.broadcast(flat.to(mesh.device), source).cpu()
            for (name, shape), part in zip(shapes.items(), flat.split(sizes), strict=True):
                held[name] = part.view(shape)


def whole(x: Tensor | None) -> Tensor:
    """A tensor's value over all ranks, as a copy on the host."""
    assert x is not None
    return shard_of(x).whole(local_of(x.detach())).cpu().clone()
