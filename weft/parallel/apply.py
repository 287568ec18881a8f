"""Spreads a model over the mesh: one function, one fixed order, the same for every model."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.comm.algorithms import summing
from weft.comm.axis import Axis
from weft.comm.background import BackgroundWorker
from weft.comm.shards import sharded_axes
from weft.job.compression import parse_compression
from weft.job.errors import JobError
from weft.job.import_by_name import find_object
from weft.memory import Fp8Codec, Fp8HostOffload, HostOffload, recomputed_units, run_in_chunks, save_as_fp8
from weft.memory.split_master import split_parameters
from weft.memory.weight_stream import WeightStream, streamed_units
from weft.mesh import Mesh, ranks_of_a_node
from weft.models.batch_norm import connect_batch_norms
from weft.parallel.compiled_units import compile_parts, recompute_and_compile
from weft.parallel.context.context_attention import Context
from weft.parallel.context.sequence_split import SequenceSplit
from weft.parallel.data.compression import Compressor, is_compressed
from weft.parallel.data.data_parallel import Replicas, Shards, shard
from weft.parallel.data.delayed_sums import DelayedSums
from weft.parallel.data.fsdp_collectives import meter_collectives
from weft.parallel.expert.expert_load import ExpertLoad
from weft.parallel.expert.expert_parallel import (
    expert_gradient_sum,
    keep_local_experts,
    mark_as_sharded,
    shard_experts,
    spread_experts,
)
from weft.parallel.fp8 import DelayedScales, recipe_of, use_fp8, use_fp8_head
from weft.parallel.model_checks import check_model, cut_into_stages, refuse_scalars
from weft.parallel.pipeline.executor import Pipelined
from weft.parallel.spread_model import SpreadModel
from weft.parallel.spreaders import SPREADERS
from weft.parallel.tensor import split_tensors
from weft.parallel.tensor_layers import TensorSplit
from weft.parallel.units import aliases_of, find_units, materialise, members, same_everywhere
from weft.planner.plan import Plan
from weft.planner.schedules.known_schedules import make_schedule
from weft.precision import COMPUTE_DTYPES


def parallelize(
    model: nn.Module, mesh: Mesh, plan: Plan, seed: int = 0, bare_gradients: bool = False
) -> SpreadModel | Pipelined:
    """Spread a model over a mesh by a plan: first into stages, then each stage over the other axes.

    A model on the meta device gets its initial weights from `seed`; one with values keeps rank 0's. Set
    `bare_gradients` if the optimizer reads `grad_params`: gradients that are not summed then stay where they are.
    """
    if plan.sync == "predict" and not bare_gradients:
        raise JobError(
            "train.sync=predict is for weft train: a loop of your own needs the sum of each step; use sync=step"
        )
    pp = mesh.axis("pp")
    worker = None
    if (axis := mesh.axis(plan.joint_axis)) is not None and plan.compression != "none":
        # attention uses the group of cp at the same time, and fake peers need no worker
        worker = BackgroundWorker(mesh.device, synchronous=axis.name == "cp" or dist.get_backend(axis.group) == "fake")
    check_model(model, plan)
    own = cut_into_stages(model, plan)
    if own is not None:
        model.stage_units = own.units  # type: ignore[assignment]
        with torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                value.copy_(same_everywhere(value.to(mesh.device), mesh))
    split = plan.split if own is None else ()  # that of a module counts its parts with weights
    recomputed = recomputed_units(list(find_units(model)), plan.recompute, plan.pp * plan.virtual_stages, split)
    kinds = [kind for kind in SPREADERS if kind.wanted(model, plan)]
    separate = [find_object(kind.take_out, "spreader")(model, mesh, plan, seed) for kind in kinds if kind.take_out]
    tables = separate[0] if separate else None
    weights = WeightStream(mesh.device)
    load = ExpertLoad(model, mesh.device, mesh.everyone, plan.ep)
    if pp is None:
        summed = plan.accumulation > 1 or not bare_gradients
        if spread := next((kind.spread for kind in kinds if kind.spread), None):
            spread_model: SpreadModel = find_object(spread, "spreader")(model, mesh, plan, seed, summed)
        else:
            spread_model = spread_stage(model, mesh, plan, seed, recomputed, summed, worker, weights)
        load.watch(spread_model.module)
        return replace(spread_model, load=load if load.blocks else None, tables=tables)
    schedule = make_schedule(plan.schedule, plan.pp, plan.accumulation, plan.virtual_stages)
    stages = {}
    for index in schedule.stages_of(pp.rank):
        if own is not None:
            stage = own.stage(index)
        else:
            stage = copy.deepcopy(model)
            first, end = plan.split[index]
            stage.keep(first, end, begins=index == 0, ends=index == schedule.stages - 1)  # type: ignore[operator]
        stages[index] = spread_stage(stage, mesh, plan, seed, recomputed, worker=worker, weights=weights)
    cut = plan.tp if plan.sequence else 1
    at_once = frozenset(i for i, stage in stages.items() if recomputed.keys() & find_units(stage.module).keys())
    load.watch(*(stage.module for stage in stages.values()))
    ties = own.ties if own is not None else dict.fromkeys(aliases_of(model).values(), (0, schedule.stages - 1))
    return Pipelined(stages, schedule, pp, mesh.device, COMPUTE_DTYPES[plan.precision], cut, load, at_once, ties)


def spread_stage(
    model: nn.Module, mesh: Mesh, plan: Plan, seed: int, recomputed: dict[str, str], summed: bool = True,
    worker: BackgroundWorker | None = None, weights: WeightStream | None = None,
) -> SpreadModel:  # fmt: skip
    """Spread one stage, unit by unit, so that no rank ever holds more than one unit whole.

    `recomputed` gives the mode of each recomputed unit; `summed`: a step sums gradients of several passes; `worker`
    compresses gradients during the backward pass; `weights` takes those that live in host memory.
    """
    split, context = _tensor_split(model, mesh, plan), _context(model, mesh, plan)
    units = find_units(model)
    away = streamed_units({n: sum(p.numel() for p in u.parameters()) for n, u in units.items()}, plan.weight_share)
    work = _UnitWork(model, mesh, plan, recomputed, context, bool(away))
    low_halves: dict[str, Tensor] = {}
    for prefix, unit in [*units.items(), ("", model)]:
        modules = members(model, prefix, skip=() if prefix else tuple(units))
        keep_local_experts(modules, mesh)
        materialise(model, modules, mesh, seed, work.dtype)
        mark_as_sharded(modules, mesh)
        spread_experts(modules, mesh, split is not None and split.sequence, plan.ep_overlap)
        if split:
            split_tensors(split, model, modules)
        if context:
            for _, module in modules:
                context.span(module)
        work.prepare(prefix, unit, modules)
        if mesh.axis("dp_shard") is not None:
            refuse_scalars(unit)
            shard_experts(modules, mesh, plan, work.dtype)
            # with compression, shards are summed over their replicas by the compressor
            copied = _copied_over(mesh, plan) if worker is None else ()
            shard(unit, mesh.submesh(*copied, plan.joint_axis), plan.zero, work.dtype)
        if plan.split_master:
            pinned = plan.shares_of("master").get("host", 0.0) == 1.0
            low_halves |= split_parameters(modules, plan.states, pinned, model)
        if weights is not None and prefix in away and (plan.split_master or work.dtype == torch.float32):
            weights.park(prefix, {f"{prefix}.{n}": p for n, p in unit.named_parameters()})
    compressor = None
    if worker is not None:
        compressor = compressor_of(plan, mesh, worker, seed, dict(model.named_parameters()), split)
    data = _data_parallel(model, mesh, plan, summed, compressor, low_halves, units)
    connect_batch_norms(model, _replica_axes(mesh, plan))
    model.sample_axes = _sample_axes(mesh, plan)  # type: ignore[assignment]
    return replace(_spread_model(model, data, mesh, split), weights=weights, away=tuple(away))


def _tensor_split(model: nn.Module, mesh: Mesh, plan: Plan) -> TensorSplit | None:
    tp = mesh.axis("tp")
    return TensorSplit(tp, mesh.submesh("tp"), plan.sequence and _can_cut_sequence(model)) if tp else None


def _context(model: nn.Module, mesh: Mesh, plan: Plan) -> Context | None:
    """Attention over the ranks of cp: a decoder's, or that of the model's family."""
    cp, attention = mesh.axis("cp"), getattr(model, "context_attention", None)
    if cp is None:
        return None
    context_class = Context if attention is None else find_object(attention, "model.family")
    context: Context = context_class(cp, SequenceSplit.of(plan, cp.rank))
    return context


class _UnitWork:
    """How the units of a stage compute: fp8, recompute, offload, chunks and compilation."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, plan: Plan, recomputed: dict[str, str], context: Context | None,
        streamed: bool,
    ):  # fmt: skip
        self.model, self.plan, self.recomputed, self.context = model, plan, recomputed, context
        self.dtype, self.fp8 = COMPUTE_DTYPES[plan.precision], recipe_of(plan)
        self.codec = Fp8Codec(plan.compile) if plan.activations == "fp8" else None
        share = plan.host_gib / plan.virtual_stages
        self.offload = HostOffload(mesh.device, share)
        if self.codec is not None:
            self.offload = Fp8HostOffload(mesh.device, share, self.codec)
        plain = plan.world == 1 and not (recomputed or streamed or plan.long) and self.codec is None
        self.compiled_whole = getattr(model, "compiled_whole", ()) if plain else ()

    def prepare(self, prefix: str, unit: nn.Module, modules: list[tuple[str, nn.Module]]) -> None:
        """Prepare a unit, or with an empty prefix what is outside of them."""
        plan = self.plan
        if self.fp8:
            (use_fp8 if prefix else use_fp8_head)(modules, self.fp8)
        if prefix and plan.long:
            if plan.compile:
                compile_parts(unit, ("before", "after"))
            run_in_chunks(unit, self.context, plan.chunk, plan.tp if plan.sequence else 1, self.offload)
        elif prefix:
            compiled = plan.compile and not self.compiled_whole
            recompute_and_compile(unit, self.recomputed.get(prefix), compiled, self.fp8 is not None)
            if self.codec is not None:
                save_as_fp8(unit, self.codec)
        elif plan.compile:
            compile_parts(unit, self.compiled_whole or getattr(self.model, "compiled", ()))


def _copied_over(mesh: Mesh, plan: Plan) -> tuple[str, ...]:
    """The axes over which shards are copied and their gradients summed in each step."""
    return ("dp_replicate",) if mesh.axis("dp_replicate") is not None and not plan.alone else ()


def _data_parallel(
    model: nn.Module, mesh: Mesh, plan: Plan, summed: bool, compressor: Compressor | None,
    low_halves: dict[str, Tensor], units: dict[str, nn.Module],
) -> Replicas | Shards:  # fmt: skip
    """Data parallelism of a stage whose units are spread over the other axes."""
    if mesh.axis("dp_shard") is not None:
        copied = bool(_copied_over(mesh, plan))
        meter_collectives(model, mesh, plan.joint_axis, copied)
        return Shards(model, plan.zero, copied, compressor)
    axis, late = mesh.axis(plan.joint_axis), mesh.axis("late_sum")
    start = summing(axis, plan.allreduce, ranks_of_a_node(plan)) if axis else None
    released = plan.gradient_home == "released"
    on_host = gradients_away(model, units, released) if plan.gradient_home != "device" else frozenset()
    return Replicas(
        model, axis, COMPUTE_DTYPES[plan.precision], plan.bucket_mb, summed, start,
        *expert_gradient_sum(model, mesh), compressor, DelayedSums(late) if late else None, low_halves, on_host,
        released,
    )  # fmt: skip


def _spread_model(model: nn.Module, data: Replicas | Shards, mesh: Mesh, split: TensorSplit | None) -> SpreadModel:
    """The interface of a spread stage, by the names of its weights in the whole model."""
    whole = [n for n, p in data.master_params.items() if split and not {"tp", "ep"}.intersection(sharded_axes(p))]
    partial = tuple(n for n in data.master_params if split and n in split.partial)
    replicated = tuple(n for n in whole if n not in partial)
    names = dict(model.named_parameters())
    aliases = {n: of for n, of in aliases_of(model).items() if of not in names}
    aliases |= {n: n for n in getattr(model, "borrowed", ())}
    frozen: dict[str, Tensor] = {aliases.get(n, n): p for n, p in names.items() if not p.requires_grad}
    scales = DelayedScales(model, mesh)
    return SpreadModel(
        model, data, mesh.axis("tp"), partial, replicated, frozen, aliases, scales if scales.maxima else None
    )


def gradients_away(model: nn.Module, units: dict[str, nn.Module], released: bool) -> frozenset[str]:
    """The weights of units whose gradients can live in host memory: matrices; or can be released: all."""
    return frozenset(
        n for n, p in model.named_parameters() if p.requires_grad and (released or p.dim() > 1)
        and any(n.startswith(f"{unit}.") for unit in units)
    )  # fmt: skip


def _replica_axes(mesh: Mesh, plan: Plan) -> list[Axis]:
    """Axes over which batch norms sum: everyone, whose group no other thread uses (ranks of tp and cp count alike), or
    in a pipeline and between replicas on their own those of the ranks that share a step."""
    if plan.pp == 1 and not plan.alone:
        return [] if mesh.everyone is None else [mesh.everyone]
    return _sample_axes(mesh, plan)


def _sample_axes(mesh: Mesh, plan: Plan) -> list[Axis]:
    """The axes whose ranks have other samples of the same step."""
    names = ("dp_shard",) if plan.alone else ("dp_shard", "dp_replicate")
    return [axis for name in names if (axis := mesh.axis(name)) is not None]


def compressor_of(
    plan: Plan, mesh: Mesh, worker: BackgroundWorker, seed: int, params: dict[str, nn.Parameter],
    split: TensorSplit | None,
) -> Compressor:  # fmt: skip
    """The compressor of a stage's gradients over its data-parallel axes."""
    axis = mesh.axis(plan.joint_axis)
    across = mesh.axis("dp_replicate") if plan.dp_shard > 1 and not plan.alone else None
    assert axis is not None
    setting = parse_compression(plan.compression)

    def apart(name: str, param: Tensor) -> bool:
        """Whether the ranks of a tp group have different gradients of a weight, or sum them later."""
        return split is None or name in split.partial or "tp" in sharded_axes(param)

    names = frozenset(n for n, p in params.items() if is_compressed(setting, p.shape) and apart(n, p))
    return Compressor(
        setting, axis, across, worker, mesh.device, seed=seed, names=names, warmup=plan.compression_warmup,
        allreduce=plan.allreduce, per_node=ranks_of_a_node(plan),
    )  # fmt: skip


def _can_cut_sequence(model: nn.Module) -> bool:
    return "sequence" in set(getattr(model, "parts", {}).values())
