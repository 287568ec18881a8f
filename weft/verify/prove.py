"""The proof that every layout is the same run: one process and each layout, step by step, gradient by gradient."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.axis import Axis
from weft.comm.shards import local_of, shard_of
from weft.data.loader import Loader, to_device
from weft.data.open_dataset import open_dataset
from weft.hardware.probe import probe
from weft.hardware.shared_devices import multi_process_service
from weft.job.errors import FitError, MachineError, WeftError
from weft.job.load import parse_job
from weft.job.schema import Job
from weft.job.shapes import resolve
from weft.launch.rank_pool import RankFailed, RankPool
from weft.mesh import Mesh, connect
from weft.models.vision.batch_norm import GlobalBatchNorm
from weft.planner import RUNNABLE, Plan, check, make_plan
from weft.planner.model.counts import count_parameters
from weft.planner.rules.layout_syntax import parse_layouts, ranks
from weft.training.build import build_state
from weft.training.state import State
from weft.training.step import Stepper
from weft.verify.compare import ROUNDED, Trace, Verdict, compare, moments_of, tolerance_name
from weft.verify.routing import RoutingReplay
from weft.verify.small_job import small

DEFAULT_LAYOUTS = (
    "ddp2", "zero1", "zero2", "zero3", "tp2", "dp_shard=2 tp=2", "dp_replicate=2 tp=2", "hsdp", "pp2", "pp2 zbv",
    "pp2 dp_shard=2", "pp2 tp2", "cp2 ring", "cp2 ulysses", "cp2 dp_shard=2", "cp2 tp2", "dp_shard=2 ep=2",
    "tp2 ep2", "cp2 ep2", "pp2 dp_shard=2 ep=2",
)  # fmt: skip

TOWER_LAYOUTS = ("image:tp2 text:shard2", "image:ranks=0 text:ranks=1")
"""Layouts of models with towers besides the default ones."""

ADAM_EPS = 1e-6
"""Adam divides a gradient by its own size, so one that is zero but for rounding (a key's bias) would become a full step
of noise. With this the update stays a smooth function of the gradient, and a wrong gradient still shows."""


def with_layout(job: Job, section: dict[str, Any]) -> Job:
    """The job on local ranks in one layout: CPU ranks, or ranks that share the GPUs if the job has device=cuda."""
    raw = resolve(job).model_dump(mode="json")
    raw["parallel"] = section
    device = "cuda" if job.cluster.device == "cuda" else "cpu"
    raw["cluster"] = {"device": device, "devices_per_node": ranks(section), "share_devices": device == "cuda"}
    raw["optim"]["eps"] = max(raw["optim"]["eps"], ADAM_EPS)
    raw["data"]["record_ids"] = False
    raw["train"]["sync"] = "step"  # a layout is proven by the gradients of a step
    if raw["train"]["compile"] == "auto":  # minutes for each layout, and the same mathematics
        raw["train"]["compile"] = False
    return parse_job(raw)


def trace(job: Job, steps: int, folder: str, reference: str | None = None, round_weights: bool = False) -> None:
    """Run a few steps on the ranks of this call and write the Trace, in whole tensors, to folder/trace.pt.

    `reference` is the folder of the reference run; without one this is it, and its routing is written too.
    `round_weights` changes initial weights in their last bits.
    """
    job, plan = make_plan(job)
    trace_on(connect(plan, job.comm.timeout_s), job, plan, steps, folder, reference, round_weights)


def trace_on(
    mesh: Mesh, job: Job, plan: Plan, steps: int, folder: str, reference: str | None = None, round_weights: bool = False
) -> None:
    """trace() on a mesh that exists already."""
    began = time.perf_counter()
    state = build_state(job, plan, mesh)
    if round_weights:
        change_last_bits(state, job.train.seed)
    stepper = Stepper(job, plan, mesh, state)
    replay = RoutingReplay(state.model.load, folder, reference)
    losses, norms, gradients = [], [], []
    tables = state.model.tables
    start = whole_weights(state)
    loader = Loader(
        open_dataset(job), seed=job.train.seed, global_batch=job.train.global_batch, microbatch=plan.microbatch,
        dp_rank=mesh.dp_rank(plan), dp_size=plan.dp, prefetch=0, drop_last=job.data.drop_last,
    )  # fmt: skip
    for _, batches in zip(range(steps), loader, strict=False):
        grads = stepper.gradients([to_device(b, mesh.device) for b in batches])
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
    parameters = whole_weights(state)
    states = state.optimizers.state() | ({} if tables is None else tables.state())
    moments = moments_of({n: whole(t).float() for n, t in states.items()})
    for held in (*gradients, start, parameters, moments):
        join_stages(held, mesh)
        join_tensors(held, mesh.everyone if tables is not None or plan.towers else None, mesh)
    routing = replay.end(mesh)
    module = getattr(state.model, "module", None)  # a pipeline has stages
    batch_norms = module is not None and any(isinstance(part, GlobalBatchNorm) for part in module.modules())
    if mesh.rank == 0:
        seconds = time.perf_counter() - began
        Trace(losses, norms, gradients, start, parameters, moments, seconds, routing, batch_norms).save(Path(folder))
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


def prove(
    job: Job, layouts: list[str], steps: int = 3, shrink: bool = False,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None, pool: RankPool | None = None,
) -> list[Verdict]:  # fmt: skip
    """Compare each layout with one process. Without layouts, every one of DEFAULT_LAYOUTS that the job allows.

    Gradients are not compressed, since compression changes them, and nothing is evaluated.
    """
    comm, train = job.comm.model_copy(update={"compression": "none"}), job.train.model_copy(update={"metrics": []})
    job = job.model_copy(update={"comm": comm, "train": train})
    towers = TOWER_LAYOUTS if resolve(job).model.towers else ()
    named = parse_layouts(layouts or (*DEFAULT_LAYOUTS, *towers))
    job = small(job) if shrink else job
    reference_job, plan = _one_process(job)
    check_proof_fits(reference_job, plan, steps)
    verdicts: list[Verdict] = []
    with (
        open_pool(job, max(ranks(section) for _, section in named)) if pool is None else nullcontext(pool) as pool,
        tempfile.TemporaryDirectory(prefix="weft-prove-") as folder,
    ):
        reference = _run(pool, reference_job, 1, steps, folder)
        if reference.batch_norms and (job.train.accumulation, job.train.microbatch) == ("auto", "auto"):
            # statistics are of one microbatch of every rank, which holds other samples than one of one process
            job = job.model_copy(update={"train": job.train.model_copy(update={"accumulation": 1})})
            if plan.accumulation > 1:
                reference_job, plan = _one_process(job)
                reference = _run(pool, reference_job, 1, steps, folder)
        checker = LayoutChecker(pool, job, plan, steps, folder, reference)
        for name, section in named:
            verdict = checker.verdict(name, section)
            if verdict.verdict == "refused" and not layouts:
                continue
            verdicts.append(verdict)
            on_verdict(verdict)
    return verdicts


def _one_process(job: Job) -> tuple[Job, Plan]:
    """The job and its plan without any parallelism."""
    job, plan = make_plan(with_layout(job, {"dp_replicate": 1, "dp_shard": 1}))
    check(job, plan, RUNNABLE)
    return job, plan


def check_proof_fits(job: Job, plan: Plan, steps: int) -> None:
    """Refuse a proof whose reference does not fit into this machine's memory: what one process trains, and fp32 copies
    of the weights before and after, the moments and the gradients of every step."""
    counts = None if job.model.module else count_parameters(job.model)
    if counts is None:
        return
    trained = plan.predicted.get("states_gib", 0.0) if plan.device == "cpu" else 0.0
    needed = trained + 4 * counts.total * (4 + steps) / 2**30
    if needed > (limit := probe().memory_gib):
        raise FitError(
            f"the proof of a model of {counts.total / 1e9:.1f}B parameters over {steps} steps needs {needed:.1f} GiB "
            f"of host memory, and this machine has {limit:.1f}; --shrink proves a small model of the same kind"
        )


@contextmanager
def open_pool(job: Job, world: int) -> Iterator[RankPool]:
    """Local ranks for a proof. Ranks that share a GPU run under NVIDIA's multi-process service where it is found."""
    shared = job.cluster.device == "cuda" and len(probe().gpus) < world
    service: AbstractContextManager[dict[str, str]] = multi_process_service() if shared else nullcontext({})
    with service as environment, RankPool(job.comm.timeout_s, environment) as pool:
        yield pool


def describe_ranks(job: Job, world: int) -> str:
    """The devices of up to `world` ranks of a proof, as text."""
    if job.cluster.device != "cuda":
        return "local CPU ranks"
    gpus = len(probe().gpus)
    if gpus == 0:
        raise MachineError("--device cuda needs an NVIDIA GPU, and this machine has none; --device cpu would work")
    if world <= gpus:
        return f"up to {world} of {gpus} GPUs, one rank each, over NCCL"
    return f"up to {world} NCCL ranks that share {gpus} GPU{'s' if gpus > 1 else ''}"


@dataclass
class LayoutChecker:
    """Runs layouts and compares them with one process. After the first that differs, one process is run again, which
    shows how much rounding explains: in bf16, in fp16 and with activations in fp8 it is run in fp32, and in fp32 from
    weights that differ in their last bits."""

    pool: RankPool
    job: Job
    plan: Plan
    """Of one process."""
    steps: int
    folder: str
    """Of the reference run."""
    reference: Trace
    exact: Trace | None = None

    def verdict(self, name: str, section: dict[str, Any]) -> Verdict:
        world = ranks(section)
        try:
            spread, plan = make_plan(with_layout(self.job, section))
            check(spread, plan, RUNNABLE)
            name = plan.layout() + (f" split {section['split']}" if "split" in section else "")
            other = self._trace(spread, world)
            found = self._compare(name, world, other)
            precision = tolerance_name(self.plan)
            if found.verdict == "differs" and self.exact is None and precision in ROUNDED:
                memory = self.job.memory.model_copy(update={"activations": "exact"})
                exact, _ = _one_process(self.job.model_copy(update={"precision": "fp32", "memory": memory}))
                self.exact = self._trace(exact, 1, round_weights=precision == "fp32")
                found = self._compare(name, world, other)
            return found
        except WeftError as error:
            return Verdict(name, world, "refused", why=str(error))

    def _trace(self, job: Job, world: int, round_weights: bool = False) -> Trace:
        with tempfile.TemporaryDirectory(prefix="weft-prove-") as folder:
            return _run(self.pool, job, world, self.steps, folder, self.folder, round_weights)

    def _compare(self, name: str, world: int, other: Trace) -> Verdict:
        return compare(name, world, self.reference, other, tolerance_name(self.plan), self.exact)


def _run(
    pool: RankPool, job: Job, world: int, steps: int, folder: str, reference: str | None = None,
    round_weights: bool = False,
) -> Trace:  # fmt: skip
    try:
        pool.run(trace, world, job, steps, folder, reference, round_weights)
    except RankFailed as failure:
        if isinstance(failure.error, WeftError):  # an error that only a rank can find
            raise failure.error from None
        raise
    return Trace.load(Path(folder))
