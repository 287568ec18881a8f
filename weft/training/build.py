"""Builds the state of a run from the Job and the Plan: the spread model, its optimizer, average and loss scale. Traces
a person's own module for its predicted memory and time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.random import fork_rng

from weft.comm.agreement import error_text
from weft.comm.algorithms import summing
from weft.comm.shards import local_of
from weft.data.dataset import Dataset
from weft.data.loader import Loader
from weft.data.open_dataset import has_missing_files, is_local, open_dataset
from weft.hardware.probe import probe
from weft.job.errors import JobError, MachineError, WeftError
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.memory.tensor_tracer import Tracer
from weft.memory.tensor_tracer_internals import fake_tensors, quiet_tracing
from weft.mesh import Mesh, ranks_of_a_node
from weft.models.build_model import build_model, loss_sum, meta_model
from weft.models.user.module import given_arguments
from weft.optim.build_optimizers import Optimizers, build_optimizers
from weft.optim.ema import Ema
from weft.optim.layer_rates import layer_rates
from weft.optim.streamed_optimizer import StreamedOptimizers, Tiering
from weft.parallel.apply import parallelize
from weft.parallel.data.data_parallel import Replicas
from weft.parallel.data.delayed_sums import PredictedSums
from weft.parallel.data.local_sgd import EveryStep, Rounds
from weft.parallel.model_checks import check_inputs, check_model, cut_into_stages, time_major_layers
from weft.parallel.pipeline.executor import Pipelined
from weft.parallel.pipeline.module_stages import ModuleStages
from weft.parallel.split_report import describe_split, tensor_parallel_facts
from weft.parallel.spread_model import SpreadModel
from weft.parallel.units import find_units
from weft.planner.module_costs import ModuleFacts, predict_module
from weft.planner.plan import Plan
from weft.planner.ranks import device_memory, device_of
from weft.precision import COMPUTE_DTYPES, LossScale
from weft.training.initial_weights import InitialWeights
from weft.training.state import State


def build_state(job: Job, plan: Plan, mesh: Mesh, weights: InitialWeights | None = None) -> State:
    """The state of a run at step 0, with random weights or those that `weights` fills in."""
    module = build_model(job.model, job.train.seed)
    units = tuple(find_units(module))
    if job.model.module and (plan.pp * plan.tp > 1 or time_major_layers(module)):
        _call_as_given(module, job, plan, open_dataset(job))
    if job.model.module:
        check_inputs(module)
    spread_model = parallelize(module, mesh, plan, job.train.seed, bare_gradients=True)
    late = plan.split_master or plan.weight_share > 0
    if weights is not None and not late:
        weights(spread_model.master_params | spread_model.frozen, spread_model.buffers())
        spread_model.refresh()
    ema = Ema(spread_model.master_params, job.train.ema, fill=not late)
    scale = LossScale.for_precision(plan.precision)
    if plan.tiered:
        optimizers: Optimizers = make_streamed_optimizers(job, plan, spread_model, mesh, ema, units)
    else:
        optimizers = make_optimizers(job, spread_model, mesh, units)
    if mesh.device.type == "cuda" and plan.precision != "fp32":
        optimizers.multiply_in(torch.bfloat16)
    if weights is not None and late:
        fill_late(optimizers, spread_model, weights)
    state = State(spread_model, optimizers, ema, scale, mesh)
    state.rounds = make_rounds(job, plan, mesh, state)
    return state


FILLED_ELEMENTS = 1 << 28
"""Weights that are read at once where they do not all have memory on the device."""


def fill_late(optimizers: Optimizers, spread_model: SpreadModel | Pipelined, weights: InitialWeights) -> None:
    """Fill weights of which some live in host memory, or whose master weights are split, some at a time."""
    some: list[str] = []
    frozen = optimizers.frozen(spread_model.frozen)
    weights(frozen, spread_model.buffers())
    for name, master in (*spread_model.master_params.items(), ("", None)):
        size = sum(local_of(spread_model.master_params[n]).numel() for n in some)
        if some and (master is None or size + local_of(master).numel() > FILLED_ELEMENTS):
            values = optimizers.masters(some)
            weights(values, {})
            optimizers.restore({f"model.{n}": v for n, v in values.items()})
            optimizers.start_averages(some)
            some = []
        some += [name] if master is not None else []
    spread_model.refresh()


def make_rounds(job: Job, plan: Plan, mesh: Mesh, state: State) -> EveryStep:
    """How replicas are synchronized between steps, as set by train.sync."""
    axis = mesh.axis("dp_replicate")
    if plan.sync == "predict":
        (part,) = state.model.parts
        assert isinstance(part.data, Replicas)
        return PredictedSums(part.data, state.optimizers.shards, job.train.steps)
    if not plan.alone or axis is None:
        return EveryStep()
    start = summing(axis, plan.allreduce, ranks_of_a_node(plan))
    limit = int(plan.bucket_mb * 2**20 / 4)
    return Rounds(
        job.train.sync, axis, start, state.model.master_params, state.ema.averages, job.train.steps, limit,
        state.model.refresh,
    )  # fmt: skip


def make_optimizers(job: Job, spread_model: SpreadModel | Pipelined, mesh: Mesh, units: tuple[str, ...]) -> Optimizers:
    """The job's optimizer over the master weights. Muon treats those in the blocks, whose names are `units`,
    differently."""
    return build_optimizers(
        job.optim, spread_model.master_params, _is_block_weight(units), spread_model.grad_params,
        spread_model.compute_params, mesh, rates_of(job),
    )  # fmt: skip


def rates_of(job: Job) -> dict[str, float]:
    """The factors of optim.layer_decay by weight; empty without it."""
    if job.optim.layer_decay == 1:
        return {}
    model = build_model(job.model)
    return layer_rates([n for n, _ in model.named_parameters()], list(find_units(model)), job.optim.layer_decay)


def units_of(job: Job) -> tuple[str, ...]:
    """The names of the model's blocks."""
    return tuple(find_units(build_model(job.model)))


def _is_block_weight(units: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a name is that of a weight in a block; the biases of experts are tables, not matrices."""
    return lambda name: name.startswith(units) and not name.endswith(".bias")


def make_streamed_optimizers(
    job: Job, plan: Plan, spread_model: SpreadModel | Pipelined, mesh: Mesh, ema: Ema, units: tuple[str, ...]
) -> StreamedOptimizers:
    """The job's optimizer, with its states where the plan has them."""
    shares = {
        kind: {home: share for home, share in plan.shares_of(kind).items() if share}
        for kind in ("moments", "master", "averages")
    }
    tiering = Tiering(
        shares, plan.split_master, plan.lazy_update, int(plan.stream_gib * 2**30), plan.disk, plan.states,
        job.train.seed,
    )  # fmt: skip
    made = StreamedOptimizers(job.optim, spread_model, _is_block_weight(units), mesh, list(units), ema, tiering)
    for part in spread_model.parts:
        made.watch(part.module, find_units(part.module))
    return made


def with_prediction(job: Job, plan: Plan, dataset: Dataset | None = None) -> Plan:
    """The plan of a person's own module with its predicted memory, traffic and time. Where the module needs the values
    of tensors, or its data is not on this machine, the plan gives the reason; a module or dataset that a run would
    refuse is refused."""
    if not job.model.module or plan.predicted:
        return plan
    try:
        with warnings.catch_warnings(), quiet_tracing(), fork_rng(devices=[]):  # the run draws what it would without
            warnings.simplefilter("ignore")
            data = dataset or dataset_here(job)
            module, stages = check_module(job, plan, data)
            facts = layout_facts(module_facts(job, plan, data), module, stages)
            if plan.tp > 1:
                plan = replace(plan, reasons=(*plan.reasons, describe_split(module, plan.tp)))
    except Exception as error:  # the run itself reports it, if it is a fault
        if dataset is None and isinstance(error, JobError):
            raise
        text = str(error) if isinstance(error, WeftError) else error_text(error)
        why = f"memory and time are not predicted: {text.strip().partition(chr(10))[0]}"
        return plan if why in plan.reasons else replace(plan, reasons=(*plan.reasons, why))
    predicted = predict_module(job, plan, facts)
    limit = device_memory(job, device_of(job, plan), probe(), plan.world)
    if predicted["memory_gib"] > limit:
        why = f"{plan.device_name} has {limit:.1f} GiB, and more is predicted; a smaller train.microbatch needs less"
        plan = replace(plan, reasons=(*plan.reasons, why))
    return replace(plan, predicted=predicted)


def _call_as_given(module: nn.Module, job: Job, plan: Plan, dataset: Dataset) -> None:
    """Let the forward be recorded as it is called with the samples."""
    module.given = given_arguments(module, dataset.train(0), job.model, plan.microbatch)  # type: ignore[assignment]


def check_module(job: Job, plan: Plan, dataset: Dataset) -> tuple[nn.Module, ModuleStages | None]:
    """Refuse a person's own module that cannot be trained as the plan says; else the module without weights, and its
    stages."""
    module = meta_model(job.model)
    _call_as_given(module, job, plan, dataset)
    check_inputs(module)
    check_model(module, plan)
    return module, cut_into_stages(module, plan)


def layout_facts(facts: ModuleFacts, module: nn.Module, stages: ModuleStages | None) -> ModuleFacts:
    """The facts of a module with what the ranks of tp and pp exchange."""
    given: Any = module.given
    tp = tensor_parallel_facts(module, given)
    return replace(
        facts, tp_reduced=tp.reduced, tp_gathered=tp.gathered, pp_sent=0.0 if stages is None else stages.elements_sent()
    )


def dataset_here(job: Job) -> Dataset:
    """The dataset of a plan, which may be made on a machine that does not have its files."""
    if not is_local(job):
        raise MachineError("the data is not on this machine, and only weft train downloads it")
    try:
        return open_dataset(job)
    except JobError as error:
        if has_missing_files(job):
            raise MachineError(str(error)) from None
        raise


def write_plan(run: RunDir, plan: Plan) -> None:
    """Write plan.json again, with what was predicted."""
    new = run.plan.with_suffix(".new")
    new.write_text(plan.dumps(), encoding="utf-8")
    new.replace(run.plan)


def module_facts(job: Job, plan: Plan, dataset: Dataset) -> ModuleFacts:
    """The facts of one microbatch, forward and backward."""
    batch = first_microbatch(job, plan, dataset)
    with fake_tensors() as mode, Tracer() as meter:
        module = build_model(job.model, job.train.seed)
        fake = {name: mode.from_tensor(t) if isinstance(t, Tensor) else t for name, t in batch.items()}
        _call(module, fake, job, plan)  # gradients exist from here on, as in a later step
        meter.start()
        before = meter.live
        _call(module, fake, job, plan)
        meter.stop()
    params = list(module.parameters())
    return ModuleFacts(
        [tuple(p.shape) for p in params if p.requires_grad], sum(p.numel() for p in params if not p.requires_grad),
        len(find_units(module)), meter.peak - before, meter.flops, meter.allocated, meter.operators,
    )  # fmt: skip


def first_microbatch(job: Job, plan: Plan, dataset: Dataset) -> dict[str, Any]:
    """The first samples of a rank."""
    size = plan.microbatch
    loader = Loader(dataset, seed=job.train.seed, global_batch=size, microbatch=size, dp_rank=0, dp_size=1, prefetch=0)
    return next(iter(loader))[0]


def _call(module: nn.Module, batch: dict[str, Any], job: Job, plan: Plan) -> None:
    dtype = COMPUTE_DTYPES[plan.precision]
    loss = loss_sum(module, batch, job.model, seed=job.train.seed, smoothing=job.train.label_smoothing, dtype=dtype)
    loss.backward()
