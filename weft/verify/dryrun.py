"""A dry run: one rank's real model, mesh and step on tensors without data, beside ranks that do not exist.

What it counts is what the engine does: live bytes, FLOPs and collectives, next to what the formulas say.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.comm.fake_internals import real_meshes
from weft.comm.shards import local_of
from weft.job.errors import JobError
from weft.job.optim import OPTIMIZERS
from weft.job.schema import Job
from weft.job.shapes import PATCH_DIM
from weft.memory.tracer import Tracer
from weft.mesh import Mesh, connect, pretend
from weft.parallel.pipeline.executor import Pipelined
from weft.parallel.spread_model import Batch
from weft.planner import RUNNABLE, check, make_plan
from weft.planner.memory.expert_bytes import EXPERT_AXES
from weft.planner.memory.peak import peak_of
from weft.planner.memory.rank_bytes import flops_of, states_of, traffic_of
from weft.planner.plan import Plan
from weft.training.build import build_state
from weft.training.step import Stepper

GIB = 2**30
COPIED = {"gloo": frozenset({"reduce_scatter"})}
"""Collectives before which a backend copies what it is given."""


@dataclass(frozen=True)
class Collective:
    """One kind of message along one axis, over a whole step. Bytes are those of the whole tensors."""

    axis: str
    kind: str
    calls: int
    bytes: int
    estimated_bytes: int


@dataclass(frozen=True)
class DryRun:
    """What one rank's step did, and what was estimated for it. All bytes; keys of both dicts are the same."""

    layout: str
    rank: int
    world: int
    position: str
    traced: dict[str, float]
    estimated: dict[str, float]
    collectives: tuple[Collective, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "collectives": [c.__dict__ for c in self.collectives]}


def dryrun(job: Job, plan: Plan, rank: int = 0) -> DryRun:
    """Trace one step of one rank of a plan. The job is resolved, and the plan is its own."""
    began = time.perf_counter()
    check(job, plan, RUNNABLE)
    if not 0 <= rank < plan.world:
        raise JobError(f"--rank {rank} is not one of the {plan.world} ranks; 0 to {plan.world - 1} are")
    if job.model.module or not OPTIMIZERS[job.optim.name].dry_run:
        what = f"model.module={job.model.module}" if job.model.module else f"optim.name={job.optim.name}"
        raise JobError(f"{what} reads values of tensors, and a dry run has none; one of Weft's models with adamw works")
    if plan.sync != "step":
        raise JobError(
            f"train.sync={plan.sync}: a dry run traces a step that sums gradients; train.sync=step would work"
        )
    mesh = pretend(plan, rank)
    try:
        norms = _fused_norms() if plan.device == "cuda" else nullcontext()
        with warnings.catch_warnings(), real_meshes(), norms, FakeTensorMode(allow_non_fake_inputs=True):
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # stages copy the model
            meter, parts = trace(job, plan, mesh, copied=COPIED.get(plan.backend, frozenset()))
        return _compare(job, plan, mesh, meter, parts, began)
    finally:
        mesh.close()


def measured_peak(job: Job) -> int:
    """On a real rank: the most bytes of tensors that a real step had at once. Its ranks call this together."""
    job, plan = make_plan(job)
    meter, _ = trace(job, plan, connect(plan, job.comm.timeout_s))
    return meter.peak


def trace(job: Job, plan: Plan, mesh: Mesh, copied: frozenset[str] = frozenset()) -> tuple[Tracer, dict[str, int]]:
    """Build this rank and take a step under a meter; also the bytes of what it keeps. `copied` as the meter's."""
    with Tracer(_names(mesh), copied) as meter:
        state = build_state(job, plan, mesh)
        state.scale.dynamic = False  # whether a step overflowed is a value, and there are none
        if isinstance(state.model, Pipelined):
            state.model.links.keep_sent = plan.backend != "nccl"
        state.optimizers.allocate()
        state.model.zero_grad()
        for name, shard in state.optimizers.params.items():
            if shard is not state.optimizers.master_params[name]:  # FSDP2 may move a shard before its first use
                shard.data = shard.data.new_empty(0)
        stepper = Stepper(job, plan, mesh, state, blind=True)
        batches = [make_batch(job, plan) for _ in range(plan.accumulation)]
        meter.start()
        grads = stepper.gradients(batches)
        stepper.update(grads, stepper.learning_rate())
        meter.stop()
    master_params = state.model.master_params.values()
    weights = [w for stage in _stages(state.model) for w in getattr(stage.data, "weights", {}).values()]
    parts = {
        "parameters": _bytes(master_params),
        "copies": _bytes(weights) if plan.precision != "fp32" else 0,
        "gradients": _bytes(m.grad for m in master_params if m.grad is not None),
        "optimizer": _bytes(state.optimizers.state().values()),
        "average": _bytes(state.ema.averages.values()),
    }
    return meter, parts


def _names(mesh: Mesh) -> dict[str, str]:
    """The axis of every process group; where the experts' is another's too, the other's."""
    axes = sorted(mesh.axes.items(), key=lambda axis: axis[0] not in EXPERT_AXES)
    groups = {str(axis.group.group_name): name for name, axis in axes}
    if mesh.everyone is not None:
        groups.setdefault(str(mesh.everyone.group.group_name), "everyone")
    return groups


def _stages(spread_model: Any) -> list[Any]:
    return list(spread_model.stages.values()) if hasattr(spread_model, "stages") else [spread_model]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of some tensors, each counted once."""
    storages = {s._cdata: s.nbytes() for t in tensors for s in [local_of(t.detach()).untyped_storage()]}
    return sum(storages.values())


def make_batch(job: Job, plan: Plan) -> Batch:
    """A microbatch of the shapes that the job's data would have."""
    size, seq, model = plan.microbatch, job.data.seq_len, job.model
    tokens = torch.zeros(size, seq, dtype=torch.int64)
    batch = {"ids": torch.zeros(size, dtype=torch.int64)}
    if model.is_stack:
        vectors = torch.zeros(size, model.dim or 0)
        return {**batch, "inputs": vectors, "targets": vectors.clone(), "valid": torch.ones(size, dtype=torch.bool)}
    if model.is_classifier:
        classes, patches = torch.zeros(size, dtype=torch.int64), torch.zeros(size, seq, PATCH_DIM)
        return {**batch, "inputs": patches, "targets": classes, "valid": torch.ones(size, dtype=torch.bool)}
    batch |= {"inputs": tokens, "targets": tokens.clone(), "valid": torch.ones(size, seq, dtype=torch.bool)}
    if job.data.mask_documents:
        batch |= {"docs": tokens.clone(), "positions": tokens.clone()}
    return batch


def _compare(job: Job, plan: Plan, mesh: Mesh, meter: Tracer, parts: dict[str, int], began: float) -> DryRun:
    states, traffic = states_of(job, plan, mesh.rank), traffic_of(job, plan, mesh.rank)
    assert states is not None
    groups, expected = _names(mesh), Counter[tuple[str, str]]()
    for axis, kinds in traffic.items():
        found = mesh.everyone if axis == "everyone" else mesh.axes.get(axis)
        name = axis if found is None else groups[str(found.group.group_name)]
        expected.update({(name, kind): amount for kind, amount in kinds.items()})
    collectives = tuple(
        Collective(axis, kind, meter.calls[axis, kind], meter.bytes[axis, kind], expected.get((axis, kind), 0))
        for axis, kind in sorted({*meter.bytes, *expected})
    )
    traced = {**parts, "peak_memory": meter.peak, "flops": meter.flops, "communication": sum(meter.bytes.values())}
    estimated = {
        **states.__dict__,
        "peak_memory": peak_of(job, plan, mesh.rank),
        "flops": flops_of(job, plan, mesh.rank),
        "communication": sum(expected.values()),
    }
    took = time.perf_counter() - began
    return DryRun(plan.layout(), mesh.rank, plan.world, mesh.position, traced, estimated, collectives, took)


class _FusedNorm(torch.autograd.Function):
    """What a GPU's one kernel takes and keeps for an RMS norm; a CPU would make it of several operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def _fused_norms() -> Iterator[None]:
    before = nn.RMSNorm.forward
    nn.RMSNorm.forward = lambda self, x: _FusedNorm.apply(x, self.weight)  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.RMSNorm.forward = before  # type: ignore[method-assign]


def show(found: DryRun) -> str:
    """For a terminal: traced beside estimated."""
    rows = [f"rank {found.rank} of {found.world} ({found.position}), {found.layout}: {found.seconds:.0f} s", ""]
    rows.append(f"{'':24}{'traced':>14}{'estimated':>14}{'off by':>9}")
    for key, value in found.traced.items():
        unit, size = ("TFLOP", 1e12) if key == "flops" else ("GiB", GIB)
        rows.append(_row(f"{key.replace('_', ' ')}, {unit}", value / size, found.estimated[key] / size))
    rows += ["", f"{'collectives of a step':24}{'traced GiB':>14}{'estimated':>14}{'off by':>9}{'calls':>8}"]
    for c in found.collectives:
        rows.append(_row(f"{c.axis} {c.kind}", c.bytes / GIB, c.estimated_bytes / GIB) + f"{c.calls:8}")
    return "\n".join(rows)


def _row(name: str, traced: float, estimated: float) -> str:
    off = f"{estimated / traced - 1:+.2%}" if traced else ("" if not estimated else "new")
    return f"{name:24}{traced:14.6g}{estimated:14.6g}{off:>9}"
