"""Functions that tests run on ranks; spawned ranks import them by name."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.checkpoint.checkpointer import Checkpointer
from weft.comm.shards import local_of, shard_of, sharded_axes
from weft.data.loader import Loader, to_device, val_batches
from weft.data.open_dataset import open_dataset
from weft.extensions.optimizers.matrix_updates import add_up
from weft.guards.work_shares import limits, shares_of
from weft.job.errors import WeftError
from weft.job.schema import Job
from weft.mesh import Mesh, connect
from weft.parallel.expert.expert_load import LOAD_PREFIX
from weft.planner import RUNNABLE, Plan, check, make_plan
from weft.training.build import build_state
from weft.training.initial_weights import published_weights
from weft.training.step import Stepper
from weft.verify.compare import Trace, moments_of
from weft.verify.traced_run import join_stages


def ready() -> str:
    return torch.__version__


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run."""

    shards: dict[str, tuple[tuple[tuple[str, int], ...], str]]
    """For each weight, which shard of it this rank holds and a digest of its bits."""
    collectives: list[Counter[str]]
    """What the forward and backward passes of each step asked the process groups for."""
    scales: list[float]
    taken: list[bool]


@dataclass(frozen=True)
class Result:
    """A run of a few steps, whole tensors, from rank 0."""

    trace: Trace
    ema: dict[str, Tensor]


Planned = tuple[Job, Plan]


def begin(job: Job | Planned) -> tuple[Job, Plan, Mesh, Stepper, Loader]:
    """All that a rank needs to train, at step 0. A job that one has planned for all need not be planned by each."""
    job, plan = job if isinstance(job, tuple) else make_plan(job)
    check(job, plan, RUNNABLE)
    mesh = connect(plan, 300.0)
    torch.default_generator.manual_seed(mesh.rank)  # whatever a layout draws here must not reach the weights
    stepper = Stepper(job, plan, mesh, build_state(job, plan, mesh, published_weights(job)))
    loader = Loader(
        open_dataset(job), seed=job.train.seed, global_batch=job.train.global_batch, microbatch=plan.microbatch,
        dp_rank=mesh.dp_rank(plan), dp_size=plan.dp, prefetch=0,
    )  # fmt: skip
    return job, plan, mesh, stepper, loader


def observe(
    job: Job | Planned, steps: int, file: str, scale: float | None = None, count: bool = False,
    counts: tuple[int, ...] | None = None, dropped: str | None = None,
) -> Seen:  # fmt: skip
    """Train a few steps and leave the Result in a file; `count` the collectives on the way, which is slow. `counts` are
    the samples that each data-parallel rank reads of a step, where they are not the same; gradients of the weights
    whose names begin with `dropped` are lost."""
    job, plan, mesh, stepper, loader = begin(job)
    if counts is not None:
        loader.shares = shares_of(counts, limits(plan, job.train.global_batch))
    state = stepper.state
    master_params = state.model.master_params
    start = wholes(master_params)
    if scale is not None:
        state.scale.value, state.scale.growth_interval = scale, 2
    losses, norms, gradients, collectives, scales, taken = [], [], [], [], [], []
    for _, batches in zip(range(steps), loader, strict=False):
        scales.append(state.scale.value)
        counted = Collectives()
        with counted if count else nullcontext():
            grads = stepper.gradients([to_device(b, mesh.device) for b in batches])
        collectives.append(counted.seen)
        for name, param in state.model.grad_params.items():
            if dropped is not None and name.startswith(dropped) and param.grad is not None:
                local_of(param.grad).zero_()
        found = wholes({n: x.grad for n, x in state.model.grad_params.items() if x.grad is not None})
        gradients.append({n: g * grads.factor for n, g in found.items()})
        norm, was_taken = stepper.update(grads, stepper.learning_rate())
        taken.append(was_taken)
        total = grads.loss.double() / plan.tp
        if mesh.everyone is not None:
            mesh.everyone.all_reduce(total)
        losses.append(float(total / grads.count))
        norms.append(float(norm))
    evaluation = None
    if state.ema.averages:
        evaluation = stepper.evaluate([[to_device(b, mesh.device) for b in next(loader)]])["val_loss"]
    end, ema = wholes(master_params), wholes(state.ema.averages)
    moments = moments_of(wholes(state.optimizers.state()))
    for held in (start, end, ema, moments, *gradients):
        join_stages(held, mesh)
    if mesh.rank == 0:
        trace = Trace(losses, norms, gradients, start, end, moments, 0.0, evaluation=evaluation)
        torch.save(Result(trace, ema), Path(file))
    mesh.barrier()
    return Seen({n: _shard(m, mesh) for n, m in master_params.items()}, collectives, scales, taken)


def waited(job: Job, steps: int) -> tuple[int, dict[str, float]]:
    """How many collectives this rank entered, and how long it waited on each axis."""
    _, _, mesh, stepper, loader = begin(job)
    for _, batches in zip(range(steps), loader, strict=False):
        stepper.update(stepper.gradients(batches), stepper.learning_rate())
    mesh.barrier()
    return mesh.meter.number, mesh.meter.waited


def move(job: Job | Planned, folder: str, train: int, file: str) -> int | None:
    """Open the newest checkpoint of a folder, if it has one; train; save. Leaves (state as opened, state as saved)."""
    job, plan, mesh, stepper, _ = begin(job)
    state = stepper.state
    checkpoints = Checkpointer(Path(folder), group=mesh.host_group, keep=9, keep_every=0, background=False)
    tensors = state.loadable_tensors(saved_world=0)
    found = checkpoints.load_newest(tensors)
    if found is not None:
        state.restore(tensors, found.meta)
    opened = _whole_state(stepper)
    loader = Loader(
        open_dataset(job), seed=job.train.seed, global_batch=job.train.global_batch, microbatch=plan.microbatch,
        dp_rank=mesh.dp_rank(plan), dp_size=plan.dp, prefetch=0, start_step=state.step,
    )  # fmt: skip
    for _, batches in zip(range(train), loader, strict=False):
        stepper.update(stepper.gradients(batches), stepper.learning_rate())
    state.agree()
    saved = _whole_state(stepper)
    checkpoints.save(state.step, state.tensors(), state.meta(job, plan), wait=True)
    if mesh.rank == 0:
        torch.save((opened, saved), Path(file))
    mesh.barrier()
    return None if found is None else found.step


def buffers_after(job: Job | Planned, train: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's buffers after some steps, before and after the ranks agreed on them."""
    _, _, _, stepper, loader = begin(job)
    for _, batches in zip(range(train), loader, strict=False):
        stepper.update(stepper.gradients(batches), stepper.learning_rate())
    before = {n: b.clone() for n, b in stepper.state.model.buffers().items()}
    stepper.state.agree()
    return before, {n: b.clone() for n, b in stepper.state.model.buffers().items()}


def _whole_state(stepper: Stepper) -> dict[str, Tensor]:
    optional = ("random", LOAD_PREFIX)  # loaded apart, by training/optional_state.py
    held = wholes({n: t for n, t in stepper.state.tensors().items() if not n.startswith(optional)})
    join_stages(held, stepper.mesh)
    return held


@torch.no_grad()
def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of whole tensors on every rank, gathered in few messages."""
    alike = {n: (t.shape, getattr(t, "device_mesh", None), getattr(t, "placements", ())) for n, t in tensors.items()}
    known = {alike[n]: shard_of(t) for n, t in {alike[n]: (n, t) for n, t in tensors.items()}.values()}  # slow in torch
    shards, parts = {n: known[alike[n]] for n in tensors}, {n: local_of(t) for n, t in tensors.items()}
    out = {n: parts[n].new_zeros(t.shape) for n, t in tensors.items()}
    for n, whole in out.items():
        whole[shards[n].box] = parts[n]
    for kind in {t.dtype for t in out.values()}:
        names = [n for n in out if out[n].dtype == kind]
        add_up([[out[n]] for n in names], [shards[n] for n in names])
    return out


def refusal(job: Job) -> str:
    """What a job is refused with, once the ranks know its model."""
    try:
        begin(job)
    except WeftError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


class Collectives(TorchDispatchMode):
    """Counts the collectives that are asked for inside it, whoever asks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = str(func).partition(".")
        if "c10d" in namespace:
            self.seen[name.partition(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


class LastBitNoise(TorchDispatchMode):
    """Changes the last bits of every sum and product, on each rank in another way: as if the ranks' libraries chose
    different kernels. Element-wise operations are exact."""

    KINDS = (
        "mm", "addmm", "bmm", "baddbmm", "dot", "mv", "sum", "mean", "norm", "linalg_vector_norm", "_foreach_norm",
        "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "logsumexp",
        "_softmax", "_softmax_backward_data", "linalg_qr", "embedding_dense_backward",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    )  # fmt: skip

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.factor = 1 + rank * 2.0**-21

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes again as operations on local tensors
        out = func(*args, **(kwargs or {}))
        if (kind := func.overloadpacket.__name__) in self.KINDS:
            dtypes = (torch.float32, torch.float64) if kind == "_foreach_norm" else (torch.float32,)
            for each in out if isinstance(out, list | tuple) else [out]:
                if isinstance(each, Tensor) and each.dtype in dtypes:
                    each.mul_(self.factor)
        return out


def replicas_with_noise(job: Job | Planned, steps: int) -> Seen:
    """Train with another LastBitNoise on every rank."""
    job, _, mesh, stepper, loader = begin(job)
    master_params, norms = stepper.state.model.master_params, []
    with LastBitNoise(mesh.rank):
        for _, batches in zip(range(steps), loader, strict=False):
            norm, _ = stepper.update(stepper.gradients(batches), stepper.learning_rate())
            norms.append(float(norm))
    mesh.barrier()
    return Seen({n: _shard(m, mesh) for n, m in master_params.items()}, [], norms, [])


def _shard(master: Tensor, mesh: Mesh) -> tuple[tuple[tuple[str, int], ...], str]:
    local = master.to_local() if isinstance(master, DTensor) else master
    where = tuple((axis, mesh.coord(axis)) for axis in sharded_axes(master))
    return where, hashlib.sha256(local.detach().contiguous().numpy().tobytes()).hexdigest()


def own_loop(folder: str, steps: int) -> tuple[int, list[float]]:
    """What a person writes who keeps the loop: any module, any optimizer, Weft's mesh, spread and checkpoints."""
    world = int(os.environ["WORLD_SIZE"])
    job = weft.Job.model_validate({"cluster": {"device": "cpu"}, "parallel": {"dp_shard": -1, "zero": 2}})
    plan = weft.plan(job, world)
    mesh = weft.connect(plan)
    torch.manual_seed(mesh.rank)  # every rank keeps rank 0's values
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    spread_model = weft.parallelize(model, mesh, plan)
    optimizer = torch.optim.SGD(spread_model.master_params.values(), lr=0.01, foreach=False)
    done = weft.load(folder, spread_model.master_params, mesh) or {"step": 0}
    data = torch.arange(8 * 6.0).view(8, 6).sin()
    mine = data.chunk(world)[mesh.rank]
    for _ in range(steps):
        spread_model.zero_grad()
        spread_model.microbatch(last=True)
        (spread_model.module(mine) - mine.sum(1, keepdim=True)).square().sum().backward()
        spread_model.finish()
        optimizer.step()
        spread_model.refresh()
    weft.save(folder, spread_model.master_params, mesh, step=done["step"] + steps)
    flat = torch.cat([t.reshape(-1) for t in wholes(spread_model.master_params).values()])
    return done["step"], flat.tolist()


def evaluated(job: Job | Planned) -> dict[str, float]:
    """The figures of one evaluation of the initial weights."""
    job, plan, mesh, stepper, _ = begin(job)
    batches = val_batches(
        open_dataset(job), global_batch=job.train.global_batch, microbatch=plan.microbatch, dp_rank=mesh.dp_rank(plan),
        dp_size=plan.dp, limit=job.train.eval_batches,
    )  # fmt: skip
    steps = [[to_device(b, mesh.device) for b in step] for step in batches]
    if len(steps) > 1:
        assert stepper.evaluate(steps, stop=lambda: True) == {}, "it was not stopped"
    return stepper.evaluate(steps)


def replica_norms(job: Job | Planned) -> tuple[list[float], float, list[float]]:
    """Square norms of each replica's gradient as measured, the norm of their mean, and the former computed again."""
    job, plan, mesh, stepper, loader = begin(job)
    batches = [to_device(b, mesh.device) for b in next(loader)]
    module, loss_of = stepper.state.model.parts[0].module, stepper.loss_of(0.0)
    count = sum(int(b["valid"].sum()) for b in batches)
    loss = sum(loss_of(module, b) for b in batches) / count
    alone = sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(module.parameters())))
    grads = stepper.gradients(batches)
    assert grads.local_square is not None
    measured = float(grads.local_square * (grads.factor * plan.dp) ** 2)
    norm, _ = stepper.update(grads, 0.0)
    everyone = mesh.all_gather_json([measured, alone])
    return [float(m) for m, _ in everyone], float(norm), [float(a) for _, a in everyone]
