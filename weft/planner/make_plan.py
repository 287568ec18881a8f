"""From a Job to a Plan: choose what the job leaves open, check the rules, and give the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.hardware.catalog import Device, find_network
from weft.hardware.probe import probe
from weft.job.compression import parse_compression
from weft.job.errors import FitError, JobError
from weft.job.import_by_name import find_object
from weft.job.schema import Job
from weft.job.shapes import resolve
from weft.planner.advice.expert_placement import with_copies
from weft.planner.calibration import Calibration
from weft.planner.disk_space import endurance_line
from weft.planner.estimator import Estimator, make_estimator, run_memory
from weft.planner.layout_settings import (
    choose_chunks,
    choose_context_parallel,
    choose_microbatch,
    choose_precision,
    choose_sequence_parallel,
    choose_stages,
    compiles,
    pin_degrees,
)
from weft.planner.memory.tiers import (
    OFFLOAD_REASONS,
    RESIDENT,
    auto_offloads,
    can_split,
    last_resorts,
    may_fit,
    place_states,
    tier_settings,
)
from weft.planner.model.cluster_facts import cluster_facts
from weft.planner.model.fp8 import delayed_scales
from weft.planner.model.reference_rate import step_flops
from weft.planner.plan import Plan
from weft.planner.ranks import backend_of, device_for, device_memory, world_of
from weft.planner.rules.known_rules import check
from weft.planner.schedules.known_schedules import check_schedule
from weft.planner.search.branch_and_bound import LayoutSearch, SearchResult
from weft.planner.search.candidates import Layouts
from weft.planner.search.choose import plan_space, search_layout
from weft.planner.sync import default_layout
from weft.planner.table_placement import with_tables
from weft.planner.time.buckets import bucket_mb
from weft.planner.time.traffic import communication_bytes
from weft.planner.tower_costs import with_tower_costs


def make_plan(job: Job, world: int | None = None, calibration: Calibration | None = None) -> tuple[Job, Plan]:
    """The resolved job and its plan. `world` is the number of ranks already decided (--nproc, torchrun)."""
    return best_plan(start_plan(job, world), calibration)[:2]


def best_plan(start: PlanStart, calibration: Calibration | None = None) -> tuple[Job, Plan, SearchResult | None]:
    """The resolved job, the plan of its best layout, and the result of the search."""
    plan, reasons, found = pick_layout(start, calibration)
    job, made = complete_or_advise(start, plan, reasons, found.estimator if found else None)
    budget = job.memory.budget_gib
    if budget and found is not None and len(found) == 0 and budget < found.smallest_gib:
        raise FitError(
            f"memory.budget_gib={budget:g} is less than the {found.smallest_gib:.3g} GiB a rank that even "
            "recompute=full needs; a smaller train.microbatch or more ranks would need less"
        )
    return job, made, found


@dataclass(frozen=True)
class PlanStart:
    """A resolved job before its layout is chosen: its ranks, and a plan with the pinned settings."""

    job: Job
    device: Device
    world: int
    memory_gib: float
    plan: Plan
    reasons: tuple[str, ...] = ()
    spare: bool = False
    """Whether states stay on the device as far as they fit."""
    asked: Job | None = None
    """The job before memory.offload=auto became what it needs."""


def _warmup(job: Job) -> int:
    asked, steps = job.comm.compression_warmup, job.train.steps
    compressor = parse_compression(job.comm.compression).entry
    if not (compressor.ramped or compressor.adaptive):
        return 0
    if asked != "auto":
        return asked
    return min(2000, max(min(300, steps * 3 // 5), steps // 4))


def _fp8_recipe(job: Job) -> dict[str, Any]:
    return {**job.fp8.model_dump(mode="json"), "amax": "delayed" if delayed_scales(job) else "dynamic"}


def start_plan(job: Job, world: int | None = None) -> PlanStart:
    """Find the device and number of ranks, and apply the pinned settings. memory.offload=auto becomes what it needs."""
    return replace(_start_offloaded(job, world), asked=job)


def _start_offloaded(job: Job, world: int | None) -> PlanStart:
    if job.memory.offload != "auto":
        start = _start_plan(job, world)
        return start if job.memory.offload != "all" else _last_resort(start, ("all",))
    options = auto_offloads(resolve(job))
    for number, changed in enumerate(options):
        if number and changed.get("split_master") and not can_split(job, start.plan.precision, start.world):
            continue
        start = _start_plan(job.model_copy(update={"memory": job.memory.model_copy(update=changed)}), world)
        last = number == len(options) - 1
        if start.job.model.module or last or _fits(start):
            break
    why = OFFLOAD_REASONS.get(start.plan.offload, "master weights are split: they would not fit otherwise")
    reasons = start.reasons if changed is RESIDENT else (*start.reasons, why)
    start = replace(start, spare=True, reasons=reasons)
    return _last_resort(start, ("all", "states")) if last else start


def _last_resort(start: PlanStart, offloads: tuple[str, ...]) -> PlanStart:
    """The same with gradients, weights or both elsewhere if it does not fit otherwise: on one rank, as several can
    share both. The fastest of those that fit is taken, with block inputs in host memory or without."""
    job, pinned = start.job, {"weights", "gradients"} & start.job.memory.homes.keys()
    offloads = offloads if job.model.runs_in_parts else offloads[-1:]
    if job.model.module or start.world > 1 or pinned or fitting_plan(start) is not None:
        return start
    found: dict[float, PlanStart] = {}
    resorts = last_resorts(job, start.plan.precision)
    possible = may_fit(job, start.plan, start.world, start.memory_gib)
    for also, reason in list(resorts.items())[0 if possible else -1 :]:
        for offload in offloads:
            # the search would recompute as little as fits without any weights, and host memory has to hold them
            recompute = job.memory.recompute
            recompute = "full" if (recompute, offload) == ("auto", "states") and "weights" in also else recompute
            memory = job.memory.model_copy(update={"offload": offload, "recompute": recompute})
            reasons = [OFFLOAD_REASONS[offload] if r in OFFLOAD_REASONS.values() else r for r in start.reasons]
            made = _start_plan(job.model_copy(update={"memory": memory}), start.world, also)
            made = replace(made, spare=start.spare, reasons=(*reasons, reason))
            if (plan := fitting_plan(made)) is not None:
                found.setdefault(plan.predicted.get("step_time_s", 0.0), made)
            if not possible:
                return made
    return found[min(found)] if found else made


def fitting_plan(start: PlanStart) -> Plan | None:
    """The plan of the best layout with the homes of its states; None: it does not fit."""
    try:
        plan, reasons, found = pick_layout(start)
        if found is None or len(found) == 0:
            return None
        made = complete_plan(start, plan, reasons, found.estimator)[1]
    except (FitError, JobError):
        return None
    return made if made.predicted["memory_gib"] <= found.estimator.limit_gib else None


def _fits(start: PlanStart) -> bool:
    """Whether any layout fits."""
    estimator = make_estimator(start.job, start.plan, start.world, start.device, start.memory_gib)
    search = LayoutSearch(plan_space(start.job, start.plan, start.world), estimator)
    return search.size == 0 or len(search.find()) > 0


def _start_plan(job: Job, world: int | None = None, also: tuple[str, ...] = ()) -> PlanStart:
    job = default_layout(resolve(job))
    machine = probe()
    device = device_for(job, machine)
    if job.cluster.network != "auto":
        find_network(job.cluster.network, job.cluster.catalog)
    world, reasons = world_of(job, machine, device, world)
    kind = "cpu" if device.kind == "cpu" else "cuda"
    memory = device_memory(job, device, machine, world)
    precision = choose_precision(job, device, reasons)
    plan = Plan(
        device=kind, device_name=device.name, backend=backend_of(job, machine, kind, world), nodes=job.cluster.nodes,
        precision=precision, offload=job.memory.offload, compression=job.comm.compression,
        compression_warmup=_warmup(job),
        bucket_mb=Plan.bucket_mb if job.comm.bucket_mb == "auto" else job.comm.bucket_mb,
        recompute="none" if job.memory.recompute in ("auto", 0) else job.memory.recompute,
        activations=job.memory.activations,
        fp8=_fp8_recipe(job) if precision == "fp8" else {}, allreduce=job.comm.allreduce,
        sync=job.train.sync.mode, sync_every=job.train.sync.period,
    )  # fmt: skip
    plan = replace(plan, **tier_settings(job, plan, world, also))
    if job.parallel != "auto":
        plan = pin_degrees(job.parallel, plan, world, job.model.experts)
        plan = choose_sequence_parallel(job, plan, reasons)
        plan = choose_context_parallel(job, plan, device, reasons)
        plan = with_copies(job, plan, cluster_facts(job, world, device, memory))
        check(job, plan)
    return PlanStart(job, device, world, memory, plan, tuple(reasons))


def pick_layout(
    start: PlanStart, calibration: Calibration | None = None
) -> tuple[Plan, list[str], SearchResult | None]:
    """The layout: searched for Weft's models, plain replicas for a custom module."""
    job, plan = start.job, start.plan
    if not job.model.module:
        estimator = make_estimator(job, start.plan, start.world, start.device, start.memory_gib, calibration)
        chosen = search_layout(job, plan, plan_space(job, plan, start.world), estimator)
        if chosen is not None:
            return chosen[0], chosen[2], chosen[1]
    if job.parallel == "auto":
        plan = replace(plan, dp_replicate=start.world)
    check(job, plan)
    return choose_microbatch(job, plan), [], None


def complete_plan(
    start: PlanStart, plan: Plan, why: Sequence[str], estimator: Estimator | None = None
) -> tuple[Job, Plan]:
    """The chosen layout with its stages, its reasons and its predicted memory, time and traffic."""
    job, reasons = start.job, [*start.reasons, *why]
    if job.parallel == "auto":
        plan = choose_context_parallel(job, plan, start.device, reasons)
    plan = choose_chunks(job, plan, reasons)
    check(job, plan)
    plan = choose_stages(job, replace(plan, compile=compiles(job, plan)), reasons)
    if plan.pp > 1 and (problem := check_schedule(plan.schedule, plan.pp, plan.accumulation, plan.virtual_stages)):
        raise JobError(problem)
    if job.comm.bucket_mb == "auto" and plan.dp_shard == 1 and plan.dp_replicate * plan.cp > 1:
        size, reason = bucket_mb(job, plan, start.device)
        plan = replace(plan, bucket_mb=size)
        reasons += [reason] if reason else []
    if plan.tiered and not job.model.module:
        limit = (estimator or make_estimator(job, plan, start.world, start.device, start.memory_gib)).limit_gib
        plan = place_states(job, plan, limit, start.spare, reasons)
    plan = with_tower_costs(job, with_tables(job, plan, start.memory_gib), start.device, start.memory_gib)
    predicted = _predict(start, plan, estimator)
    if plan.disk and (line := endurance_line(job, plan, predicted.get("step_time_s"))):
        reasons.append(line)
    return job, replace(plan, reasons=tuple(reasons), predicted=predicted)


def complete_or_advise(
    start: PlanStart, plan: Plan, why: Sequence[str], estimator: Estimator | None = None
) -> tuple[Job, Plan]:
    """The same; if the homes of states do not fit, the error names the settings that would."""
    try:
        return complete_plan(start, plan, why, estimator)
    except FitError as error:
        raise FitError(f"{error}{or_settings_that_fit(start.asked or start.job, start.world)}") from None


def runs_here(start: PlanStart) -> bool:
    """Whether the job runs on this machine."""
    return start.job.cluster.device in ("auto", "cpu", "cuda") and start.job.cluster.nodes == 1


def check_fits(job: Job, plan: Plan) -> None:
    """Refuse what cannot fit: the states alone, which are counted exactly, exceed the device."""
    needed = sum(plan.predicted.get(k, 0.0) for k in ("states_gib", "gathered_gib"))
    limit = device_memory(job, device_for(job, probe()), probe(), plan.world)
    if needed > limit:
        raise FitError(
            f"weights, gradients and optimizer need {needed:.1f} GiB a rank, but {plan.device_name} has {limit:.1f}; "
            f"{_relief(job, plan, needed / limit)}{or_settings_that_fit(job, plan.world)}"
        )


def or_settings_that_fit(job: Job, world: int) -> str:
    """The first setting of memory.states and optim.clip with which a job that does not fit would, as the end of a
    message."""
    if job.model.module:
        return ""
    smaller = ("bf16", "8bit", "24bit-master") if job.memory.states == "exact" else ()
    clips = job.optim.clip and world == 1 and job.memory.offload in ("all", "auto")
    for clip in (job.optim.clip, 0.0) if clips else (job.optim.clip,):
        freed = clip != job.optim.clip
        for states in (*((job.memory.states,) if freed else ()), *smaller):
            tried = job.model_copy(update={
                "memory": job.memory.model_copy(update={"states": states}),
                "optim": job.optim.model_copy(update={"clip": clip}),
            })  # fmt: skip
            try:
                first = _start_plan(tried, world)
                possible = may_fit(first.job, first.plan, world, first.memory_gib)
                if not possible or fitting_plan(start_plan(tried, world)) is None:
                    continue
            except (FitError, JobError):
                continue
            settings = {f"memory.states={states}": "states in fewer bits"} if states != job.memory.states else {}
            settings |= {"optim.clip=0": "gradients that the backward pass consumes"} if freed else {}
            return f"; {' with '.join(settings)} would fit, with {' and '.join(settings.values())}"
    return ""


def _relief(job: Job, plan: Plan, times_too_large: float) -> str:
    """Which setting would reduce the states of a rank."""
    if plan.dp_shard > 1 and plan.zero < 3:
        return "cut more with parallel.zero=3, or use more ranks"
    if plan.dp_replicate > 1:
        return "cut them with parallel.dp_shard instead of dp_replicate, or use more ranks"
    more = f"use more ranks, in parallel.dp_shard{'' if job.model.module else ', parallel.tp or parallel.pp'}"
    offloadable = not plan.tiered and not job.model.module and times_too_large < OFFLOADABLE
    return f"{more}, or host memory for optimizer states with memory.offload=auto" if offloadable else more


OFFLOADABLE = 2.5
"""How many times too large states may be for offloading to help: what stays on the device is a quarter and more."""


def _predict(start: PlanStart, plan: Plan, estimator: Estimator | None) -> dict[str, float]:
    """Memory, traffic and time of a completed plan, under the names that every run prints."""
    job = start.job
    if job.model.module:
        return {}
    if estimator is None or plan.tiered:
        estimator = make_estimator(job, plan, start.world, start.device, start.memory_gib)
    made = estimator.estimate(Layouts.one(plan), detail=True)
    predicted = run_memory({part: float(gib[0]) for part, gib in made.memory.items()})
    moved = sum(communication_bytes(job, plan).values())
    predicted["communication_mib"] = moved / 2**20
    if plan.compression != "none" and (last := sum(communication_bytes(job, plan, last=True).values())) < moved:
        predicted["communication_last_mib"] = last / 2**20
    peak = estimator.mfu_peak_flops(job, plan)
    seconds = float(made.step_time_s[0])
    return predicted | {"step_time_s": seconds, "mfu": step_flops(job) / (seconds * plan.world * peak)}


def plan(job: Job, world: int | None = None) -> Plan:
    """The Plan of a job."""
    return with_module_prediction(*make_plan(job, world))


def with_module_prediction(job: Job, plan: Plan) -> Plan:
    """The plan with predicted memory and time also of a person's own module, which is built for that."""
    if not job.model.module:
        return plan
    found: Plan = find_object("weft.training.build:with_prediction", "model.module")(job, plan)
    return found
