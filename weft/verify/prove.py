"""The proof that every layout is the same run: one process and each layout, step by step, gradient by gradient."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from weft.comm.shards import local_of, shard_of
from weft.data.dataset import open_dataset
from weft.data.loader import Loader, to_device
from weft.hardware.probe import probe
from weft.hardware.shared_devices import multi_process_service
from weft.job.errors import JobError, MachineError, WeftError
from weft.job.load import parse_job
from weft.job.schema import Experts, Job
from weft.job.shapes import resolve
from weft.launch.rank_pool import RankFailed, RankPool
from weft.mesh import Mesh, connect
from weft.planner import RUNNABLE, Plan, check, make_plan
from weft.planner.rules.layout_syntax import parse_layouts, ranks
from weft.training.build import build_state
from weft.training.step import Stepper
from weft.verify.routing import Guided, Routing

TOLERANCE: dict[str, float] = {"fp32": 1e-5, "bf16": 6e-2, "fp16": 1e-2, "fp8": 0.35}
"""Norm of the difference of a gradient, relative to its own, that rounding explains. In fp8 it does not depend on the
layout: any change in the last digit of a product (another order of sums, 1e-6 of random noise) leads to other
roundings in the layers after it; with eight layers, gradients of the first step are 0.14 apart, of the third 0.3."""

SIZE_TOLERANCE: dict[str, float] = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3, "fp8": 0.1}
"""The same of what rounding, which goes up as often as down, hardly changes: the loss, the norm, the weights, and the
part of a gradient along that of one process. A gradient of half the size, or one that is missing, is 0.5 or 1 off."""

DEFAULT_LAYOUTS = (
    "ddp2", "zero1", "zero2", "zero3", "tp2", "dp_shard=2 tp=2", "dp_replicate=2 tp=2", "hsdp", "pp2", "pp2 zbv",
    "pp2 dp_shard=2", "pp2 tp2", "cp2 ring", "cp2 ulysses", "cp2 dp_shard=2", "cp2 tp2", "dp_shard=2 ep=2",
    "tp2 ep2", "cp2 ep2", "pp2 dp_shard=2 ep=2",
)  # fmt: skip

ADAM_EPS = 1e-6
"""Adam divides a gradient by its own size, so one that is zero but for rounding (a key's bias) would become a full step
of noise. With this the update stays a smooth function of the gradient, and a wrong gradient still shows."""

FLOOR = 1e-3
"""A parameter's gradient is compared to its own norm, or to this share of the whole norm where its own is smaller."""


@dataclass(frozen=True)
class Trace:
    """What one run did: a few steps' losses, norms and gradients, and the weights after them."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    seconds: float
    routing: Routing | None = None
    """Of a model with experts that was led where one process went: where it would have gone by itself."""


@dataclass(frozen=True)
class Verdict:
    """One layout beside the single process. Differences are relative."""

    layout: str
    world: int
    verdict: str
    """same, differs, or refused"""
    max_loss_diff: float | None = None
    max_grad_diff: float | None = None
    worst_parameter: str | None = None
    grad_norm_diff: float | None = None
    param_diff: float | None = None
    tolerance: float | None = None
    seconds: float | None = None
    why: str | None = None
    grad_diff_by_parameter: dict[str, float] = field(default_factory=dict)
    routed_apart: float | None = None
    """Share of the tokens' experts that the layout would have chosen otherwise; it was led where one process went."""
    router_diff: float | None = None
    """Difference of the routers' scores, relative to their spread."""
    size_diff: float | None = None
    """Largest change of a gradient along that of one process."""


def small(job: Job) -> Job:
    """The same kind of model, small enough for any laptop: fewer layers, narrower, shorter; ratios of heads kept."""
    m = job.model
    if m.module:
        raise JobError("a model of your own cannot be shrunk; give it smaller model.args instead")
    m = resolve(job).model
    updates: dict[str, Any] = {"shape": None, "layers": min(m.layers or 2, 3), "dim": min(m.dim or 64, 64)}
    if not m.is_stack:
        group = (m.heads or 4) // (m.kv_heads or 4)
        heads = max(4, 4 * group if group <= 2 else 2 * group)
        heads = min(heads, m.heads or heads)
        updates |= {
            "heads": heads, "kv_heads": max(1, heads // group), "head_dim": 16, "ffn": min(m.ffn or 128, 128),
            "vocab": min(m.vocab or 256, 512 if job.data.source == "synthetic" else 256),
        }  # fmt: skip
        seq = min(job.data.seq_len, 64)
        updates["max_len"] = seq
        job = job.model_copy(update={"data": job.data.model_copy(update={"seq_len": seq})})
    if m.experts is not None:
        updates["experts"] = _fewer(m.experts)
    train = job.train.model_copy(
        update={
            "global_batch": min(job.train.global_batch, 16),
            "batch_ramp": [],
            "microbatch": "auto",
            "accumulation": "auto",
        }
    )
    return job.model_copy(update={"model": m.model_copy(update=updates), "train": train})


def _fewer(e: Experts) -> Experts:
    """Up to 8 experts in groups of at least two, of which a token may use about the same share."""
    count, top_k = min(e.count, 8), min(e.top_k, 2)
    groups = gcd(e.groups, max(1, count // 2))
    top_groups = None if e.top_groups is None else -(-e.top_groups * groups // e.groups)
    if top_groups is not None:  # none has less room than its experts need
        top_groups = max(top_groups, -(-top_k * groups // count))
    less = {"count": count, "top_k": top_k, "ffn": min(e.ffn or 32, 32), "groups": groups, "top_groups": top_groups}
    return e.model_copy(update={**less, "first_dense": min(e.first_dense, 1)})


def with_layout(job: Job, section: dict[str, Any]) -> Job:
    """The job on local ranks under one layout: CPU ranks, or sharing the GPUs where the job says device=cuda."""
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


def trace(job: Job, steps: int, folder: str, reference: str | None = None) -> None:
    """Run a few steps on the ranks of this call and leave the Trace, whole tensors, in folder/trace.pt.

    Without a `reference`, the folder of the run to be held against, where tokens went is left beside it.
    """
    job, plan = make_plan(job)
    trace_on(connect(plan, job.comm.timeout_s), job, plan, steps, folder, reference)


def trace_on(mesh: Mesh, job: Job, plan: Plan, steps: int, folder: str, reference: str | None = None) -> None:
    """The same on a mesh that exists already."""
    began = time.perf_counter()
    state = build_state(job, plan, mesh)
    stepper = Stepper(job, plan, mesh, state)
    guided = Guided(state.model.load, folder, reference)
    losses, norms, gradients = [], [], []
    loader = Loader(
        open_dataset(job), seed=job.train.seed, global_batch=job.train.global_batch, microbatch=plan.microbatch,
        dp_rank=mesh.dp_rank(plan), dp_size=plan.dp, prefetch=0,
    )  # fmt: skip
    for _, batches in zip(range(steps), loader, strict=False):
        grads = stepper.gradients([to_device(b, mesh.device) for b in batches])
        factor = grads.factor.cpu()
        grad_params = {n: x for n, x in state.model.grad_params.items() if x.grad is not None}
        gradients.append({n: whole(x.grad).float() * factor for n, x in grad_params.items()})
        norm, _ = stepper.update(grads, stepper.learning_rate())
        total = grads.loss.double() / plan.tp
        if mesh.everyone is not None:
            mesh.everyone.all_reduce(total)
        losses.append(float(total / grads.count))
        norms.append(float(norm))
    parameters = {n: whole(m) for n, m in state.model.master_params.items()}
    for held in (*gradients, parameters):
        join_stages(held, mesh)
    routing = guided.end(mesh)
    if mesh.rank == 0:
        seconds = time.perf_counter() - began
        torch.save(Trace(losses, norms, gradients, parameters, seconds, routing), Path(folder) / "trace.pt")
    mesh.barrier()


def join_stages(held: dict[str, Tensor], mesh: Mesh) -> None:
    """Bring the weights of every stage of a pipeline together."""
    if mesh.axis("pp") is not None:  # as plain bytes: each tensor would be pickled as a file of its own
        mine = {n: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).numpy()) for n, t in held.items()}
        for other in cast(list[dict[str, Any]], mesh.all_gather_object(mine)):
            held.update({n: torch.from_numpy(x).view(dtype).view(shape) for n, (dtype, shape, x) in other.items()})


def whole(x: Tensor | None) -> Tensor:
    """A tensor's value over all ranks, as a copy on the host."""
    assert x is not None
    return shard_of(x).whole(local_of(x.detach())).cpu().clone()


def compare(layout: str, world: int, reference: Trace, other: Trace, precision: str) -> Verdict:
    """Hold one run against another."""
    by_parameter: dict[str, float] = {}
    size = 0.0
    for ours, theirs in zip(reference.gradients, other.gradients, strict=True):
        total = torch.stack([g.double().norm() for g in ours.values()]).norm()
        for name, g in ours.items():
            floor, change = torch.maximum(g.double().norm(), FLOOR * total), theirs[name].double() - g.double()
            by_parameter[name] = max(by_parameter.get(name, 0.0), _finite(change.norm() / floor))
            size = max(size, _finite((change * g.double()).sum().abs() / floor.square()))
    worst = max(by_parameter, key=lambda n: by_parameter[n])
    moved = _norm([other.parameters[n].double() - p.double() for n, p in reference.parameters.items()])
    loss = max(_relative(a, b) for a, b in zip(reference.losses, other.losses, strict=True))
    norm = max(_relative(a, b) for a, b in zip(reference.norms, other.norms, strict=True))
    param = moved / _norm([p.double() for p in reference.parameters.values()])
    apart, router = (None, None) if (r := other.routing) is None else (r.apart, r.scores)
    tolerance = TOLERANCE[precision]
    same = max(by_parameter[worst], router or 0.0) <= tolerance
    same = same and max(loss, norm, param, size) <= SIZE_TOLERANCE[precision]
    return Verdict(
        layout, world, "same" if same else "differs", loss, by_parameter[worst], worst, norm, param, tolerance,
        other.seconds, None, by_parameter, apart, router, size,
    )  # fmt: skip


def _relative(a: float, b: float) -> float:
    difference = abs(a - b) / max(abs(a), 1e-12)
    return difference if difference == difference else float("inf")


def _finite(x: Tensor) -> float:
    """A NaN would compare as no difference."""
    return float(x.nan_to_num(float("inf")))


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.norm() for t in tensors]).norm())


def prove(
    job: Job, layouts: list[str], steps: int = 3, shrink: bool = False,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None, pool: RankPool | None = None,
) -> list[Verdict]:  # fmt: skip
    """Compare each layout with one process. Without layouts, every one of DEFAULT_LAYOUTS that the job allows.

    Gradients travel uncompressed: a layout is proved, and compression is meant to change them.
    """
    job = job.model_copy(update={"comm": job.comm.model_copy(update={"compression": "none"})})
    named = parse_layouts(layouts or DEFAULT_LAYOUTS)
    job = small(job) if shrink else job
    reference_job, plan = make_plan(with_layout(job, {"dp_replicate": 1, "dp_shard": 1}))
    check(reference_job, plan, RUNNABLE)
    verdicts: list[Verdict] = []
    with (
        open_pool(job, max(ranks(section) for _, section in named)) if pool is None else nullcontext(pool) as pool,
        tempfile.TemporaryDirectory(prefix="weft-prove-") as folder,
    ):
        reference = _run(pool, reference_job, 1, steps, folder)
        for words, section in named:
            verdict = _judge(pool, job, words, section, reference, steps, plan.precision, folder)
            if verdict.verdict == "refused" and not layouts:
                continue
            verdicts.append(verdict)
            on_verdict(verdict)
    return verdicts


@contextmanager
def open_pool(job: Job, world: int) -> Iterator[RankPool]:
    """Local ranks for a proof. Ranks that share a GPU run under NVIDIA's multi-process service where it is found."""
    shared = job.cluster.device == "cuda" and len(probe().gpus) < world
    service: AbstractContextManager[dict[str, str]] = multi_process_service() if shared else nullcontext({})
    with service as environment, RankPool(job.comm.timeout_s, environment) as pool:
        yield pool


def describe_ranks(job: Job, world: int) -> str:
    """Where up to `world` ranks of a proof run, in words."""
    if job.cluster.device != "cuda":
        return "local CPU ranks"
    gpus = len(probe().gpus)
    if gpus == 0:
        raise MachineError("--device cuda needs an NVIDIA GPU, and this machine has none; --device cpu would work")
    if world <= gpus:
        return f"up to {world} of {gpus} GPUs, one rank each, over NCCL"
    return f"up to {world} NCCL ranks that share {gpus} GPU{'s' if gpus > 1 else ''}"


def _judge(
    pool: RankPool, job: Job, words: str, section: dict[str, Any], reference: Trace, steps: int, precision: str,
    held_to: str,
) -> Verdict:  # fmt: skip
    world = ranks(section)
    try:
        spread, plan = make_plan(with_layout(job, section))
        check(spread, plan, RUNNABLE)
        words = plan.layout() + (f" split {section['split']}" if "split" in section else "")
        with tempfile.TemporaryDirectory(prefix="weft-prove-") as folder:
            return compare(words, world, reference, _run(pool, spread, world, steps, folder, held_to), precision)
    except WeftError as error:
        return Verdict(words, world, "refused", why=str(error))


def _run(pool: RankPool, job: Job, world: int, steps: int, folder: str, reference: str | None = None) -> Trace:
    try:
        pool.run(trace, world, job, steps, folder, reference)
    except RankFailed as failure:
        if isinstance(failure.error, WeftError):  # what only the ranks could tell, in its own words
            raise failure.error from None
        raise
    found: Trace = torch.load(Path(folder) / "trace.pt", weights_only=False)
    return found
