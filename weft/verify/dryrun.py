"""A dry run: one rank's model, mesh and step on tensors without data, with peers that do not exist.

It counts live bytes, FLOPs and collectives of the real code, and compares them with the planner's estimates.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.agreement import error_text
from weft.comm.dtensor_internals import forget_meshes, local_tensor
from weft.comm.fake_internals import real_meshes
from weft.job.errors import JobError, WeftError
from weft.job.schema import Job
from weft.memory.tensor_tracer import Tracer
from weft.memory.tensor_tracer_internals import fake_tensors
from weft.mesh import Mesh, connect, fake_mesh
from weft.parallel.pipeline.executor import Pipelined
from weft.parallel.spread_model import Batch
from weft.planner import RUNNABLE, check, make_plan
from weft.planner.memory.engine_memory import EngineMemory, Place
from weft.planner.module_costs import ModuleFacts, module_states, module_traffic, predict_module
from weft.planner.plan import Plan
from weft.planner.search.candidates import Layouts
from weft.planner.time.expert_traffic import EXPERT_AXES
from weft.planner.time.flops import flops_of
from weft.planner.time.traffic import traffic_of
from weft.training.build import build_state, check_module, dataset_here, first_microbatch, module_facts
from weft.training.step import Stepper
from weft.verify.dryrun_internals import fused_norms, storage_bytes

GIB = 2**30
LATE_STEP = 10**9
"""Of a run whose compression is no longer ramped up, as in most of its steps."""
COPIED_BY_BACKEND = {"gloo": frozenset({"reduce_scatter"})}
"""Collectives whose input a backend copies."""


@dataclass(frozen=True)
class Collective:
    """One kind of collective on one axis, over a whole step. Bytes are those of the full tensors."""

    axis: str
    kind: str
    calls: int
    bytes: int
    estimated_bytes: int


@dataclass(frozen=True)
class DryRun:
    """What was traced of one rank's step and what was estimated, in bytes; both dicts have the same keys."""

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
    """Trace one step of one rank. The job is resolved, and the plan was made for it."""
    began = time.perf_counter()
    check(job, plan, RUNNABLE)
    if not 0 <= rank < plan.world:
        raise JobError(f"--rank {rank} is not one of the {plan.world} ranks; 0 to {plan.world - 1} are")
    if plan.sync != "step":
        raise JobError(
            f"train.sync={plan.sync}: a dry run traces a step that sums gradients; train.sync=step would work"
        )
    if plan.tiered:
        given, works = ("offload", "none") if job.memory.offload != "none" else ("states", "exact")
        raise JobError(
            f"memory.{given}={getattr(job.memory, given)}: a dry run traces whole states on the device; "
            f"{given}={works} works"
        )
    try:
        return _dryrun(job, plan, rank, OwnModule.open(job, plan) if job.model.module else None, began)
    except Exception as error:
        if not job.model.module or isinstance(error, WeftError):
            raise
        raise JobError(
            f"a dry run has no values of tensors, without which model.module={job.model.module} cannot be traced as "
            f"{plan.layout()} ({error_text(error).strip().partition(chr(10))[0]}); `weft plan` predicts its memory and "
            "time"
        ) from None


def _dryrun(job: Job, plan: Plan, rank: int, own: OwnModule | None, began: float) -> DryRun:
    mesh = fake_mesh(plan, rank)
    try:
        norms = fused_norms() if plan.device == "cuda" else nullcontext()
        with warnings.catch_warnings(), real_meshes(), norms, fake_tensors() as mode:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # stages copy the model
            batch = make_batch(job, plan) if own is None else own.batch(mode.from_tensor)
            meter, parts = trace(job, plan, mesh, batch, COPIED_BY_BACKEND.get(plan.backend, frozenset()))
        estimates = _estimates(job, plan, mesh) if own is None else own.estimates(job, plan)
        return _compare(plan, mesh, meter, parts, estimates, began)
    finally:
        mesh.close()
        forget_meshes(())  # a later dry run of this process may have a mesh of the same shape


def measured_peak(job: Job) -> int:
    """The peak bytes of live tensors in a real step. Called by every rank."""
    job, plan = make_plan(job)
    meter, _ = trace(job, plan, connect(plan, job.comm.timeout_s), make_batch(job, plan))
    return meter.peak


def trace(
    job: Job, plan: Plan, mesh: Mesh, batch: Batch, copied: frozenset[str] = frozenset()
) -> tuple[Tracer, dict[str, int]]:
    """Build this rank and trace one step of microbatches such as `batch`. Returns the tracer and the bytes of each kind
    of state."""
    with Tracer(_names(mesh), copied) as meter:
        state = build_state(job, plan, mesh)
        state.scale.dynamic, state.scale.limit = False, None  # tensors have no values, so no step can overflow
        if isinstance(state.model, Pipelined):
            state.model.links.keep_sent = plan.backend != "nccl"
        state.optimizers.allocate()
        state.model.zero_grad()
        for name, shard in state.optimizers.params.items():
            if shard is not state.optimizers.master_params[name]:  # FSDP2 may move a shard before its first use
                shard.data = shard.data.new_empty(0)
        stepper = Stepper(job, plan, mesh, state, dry_run=True)
        batches = [{key: _copied(value) for key, value in batch.items()} for _ in range(plan.accumulation)]
        for compressor in state.model.compressors:
            compressor.steps = LATE_STEP
        for _ in range(2 if state.model.compressors else 1):  # the second has what the first did not send
            meter.start()
            grads = stepper.gradients(batches)
            stepper.update(grads, stepper.learning_rate())
        meter.stop()
    master_params = [*state.model.master_params.values(), *(twin for _, twin in getattr(state.model, "twins", []))]
    weights = [w for part in state.model.parts for w in getattr(part.data, "weights", {}).values()]
    parts = {
        "parameters": _bytes(master_params),
        "copies": _bytes(weights) if plan.precision != "fp32" else 0,
        "gradients": _bytes(p.grad for p in state.model.grad_params.values() if p.grad is not None),
        "optimizer": _bytes(state.optimizers.state().values()),
        "average": _bytes(state.ema.averages.values()),
    }
    return meter, parts


def _names(mesh: Mesh) -> dict[str, str]:
    """The axis of every process group; a group that an expert axis shares is named after the other axis."""
    axes = sorted(mesh.axes.items(), key=lambda axis: axis[0] not in EXPERT_AXES)
    groups = {str(axis.group.group_name): name for name, axis in axes}
    if mesh.everyone is not None:
        groups.setdefault(str(mesh.everyone.group.group_name), "everyone")
    return groups


def _bytes(tensors: Iterable[Tensor]) -> int:
    return storage_bytes(map(local_tensor, tensors))


def make_batch(job: Job, plan: Plan) -> Batch:
    """A microbatch with the shapes of the job's data."""
    size, seq, model = plan.microbatch, job.data.seq_len, job.model
    tokens = torch.zeros(size, seq, dtype=torch.int64)
    batch = {"ids": torch.zeros(size, dtype=torch.int64)}
    if model.takes_vectors:
        vectors = torch.zeros(size, model.dim or 0)
        return {**batch, "inputs": vectors, "targets": vectors.clone(), "valid": torch.ones(size, dtype=torch.bool)}
    if model.takes_patches:
        classes, patches = torch.zeros(size, dtype=torch.int64), torch.zeros(size, seq, model.patch_dim)
        return {**batch, "inputs": patches, "targets": classes, "valid": torch.ones(size, dtype=torch.bool)}
    if model.labels_samples:
        return {**batch, "inputs": tokens, "targets": tokens[:, 0].clone(), "valid": torch.ones(size, dtype=torch.bool)}
    batch |= {"inputs": tokens, "targets": tokens.clone(), "valid": torch.ones(size, seq, dtype=torch.bool)}
    if model.has_source:
        return batch | ({"docs": tokens.clone()} if job.data.pads_batches else {})
    if job.data.separates_documents:
        batch |= {"docs": tokens.clone(), "positions": tokens.clone()}
    return batch


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


Estimates = tuple[dict[str, float], dict[tuple[str, str], float]]
"""Bytes of each kind of state, peak memory and FLOPs; bytes by axis and kind of collective."""


def _estimates(job: Job, plan: Plan, mesh: Mesh) -> Estimates:
    memory, layouts, place = EngineMemory(job, plan, traced=True), Layouts.one(plan), Place.of(plan, mesh.rank)
    group = memory.group(layouts, place)
    states = {name: float(held[0]) for name, held in group.states(group.held).items()}
    peak = sum(float(held[0]) for part, held in memory.rank(layouts, place).items() if part != "runtime")
    groups, expected = _names(mesh), Counter[tuple[str, str]]()
    for axis, kinds in traffic_of(job, plan, mesh.rank, at=math.inf).items():
        found = mesh.everyone if axis == "everyone" else mesh.axes.get(axis)
        name = axis if found is None else groups[str(found.group.group_name)]
        expected.update({(name, kind): amount for kind, amount in kinds.items()})
    return states | {"peak_memory": peak, "flops": flops_of(job, plan, mesh.rank)}, dict(expected)


@dataclass(frozen=True)
class OwnModule:
    """Samples of a person's own module, and what the planner knows of it."""

    samples: dict[str, Any]
    facts: ModuleFacts

    @classmethod
    def open(cls, job: Job, plan: Plan) -> OwnModule:
        dataset = dataset_here(job)
        check_module(job, plan, dataset)
        return cls(first_microbatch(job, plan, dataset), module_facts(job, plan, dataset))

    def batch(self, without_data: Callable[[Tensor], Tensor]) -> Batch:
        """A microbatch with the shapes of the samples."""
        return {k: without_data(v) if isinstance(v, Tensor) else v for k, v in self.samples.items()}

    def estimates(self, job: Job, plan: Plan) -> Estimates:
        predicted, traffic = predict_module(job, plan, self.facts), module_traffic(plan, self.facts)
        peak = (predicted["memory_gib"] - predicted["runtime_gib"]) * GIB
        flops = plan.accumulation * self.facts.flops / (plan.tp * plan.pp)
        states = module_states(job, plan, self.facts)
        return states | {"peak_memory": peak, "flops": flops}, {kind: size for kind, size in traffic.items() if size}


def _compare(
    plan: Plan, mesh: Mesh, meter: Tracer, parts: dict[str, int], estimates: Estimates, began: float
) -> DryRun:
    estimated, expected = estimates
    collectives = tuple(
        Collective(axis, kind, meter.calls[axis, kind], meter.bytes[axis, kind], round(expected.get((axis, kind), 0)))
        for axis, kind in sorted({*meter.bytes, *expected})
    )
    traced = {**parts, "peak_memory": meter.peak, "flops": meter.flops, "communication": sum(meter.bytes.values())}
    estimated = estimated | {"communication": sum(expected.values())}
    took = time.perf_counter() - began
    return DryRun(plan.layout(), mesh.rank, plan.world, mesh.position, traced, estimated, collectives, took)


def show(found: DryRun) -> str:
    """The tables for a terminal: traced and estimated figures."""
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
