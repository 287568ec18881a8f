"""From a Job to a Plan: fill in what the person left open, check the rules, and say why."""

from __future__ import annotations

from dataclasses import replace

from weft.hardware.catalog import Device, device_by_product, find_device, find_network
from weft.hardware.probe import Machine, probe
from weft.job.errors import FitError, JobError
from weft.job.schema import Job, Parallel
from weft.job.shapes import resolve
from weft.plan.counts import count_parameters, flops_per_sample, part_costs
from weft.plan.layout import AXES, Plan
from weft.plan.memory import communication_bytes, predict_memory
from weft.plan.rules import TP_RULES, check, divisors, nearest
from weft.plan.schedule import SCHEDULES, check_schedule
from weft.plan.split import split_stages

USABLE = 0.9
"""Share of a device's memory a plan may fill."""
TYPICAL_MFU = 0.4
"""Utilisation assumed for the predicted step time where nothing has been measured (Megatron-LM reports 0.41–0.52)."""
CPU_RANKS = 4
"""Ranks started on a CPU unless the job or --nproc says otherwise; they share all cores as threads."""
MAX_TOKENS = 65_536
"""Tokens in one microbatch beyond which a larger one gains nothing."""


def make_plan(job: Job, world: int | None = None) -> tuple[Job, Plan]:
    """The resolved job and its plan. `world` is the number of ranks already decided (--nproc, torchrun)."""
    job = resolve(job)
    machine = probe()
    device = _device(job, machine)
    if job.cluster.network != "auto":
        find_network(job.cluster.network, job.cluster.catalog)
    world, reasons = _world(job, machine, device, world)
    kind = "cpu" if device.kind == "cpu" else "cuda"
    memory = device_memory(job, device, machine, world)
    precision = job.precision if job.precision != "auto" else ("fp32" if kind == "cpu" else "bf16")
    plan = Plan(
        device=kind, device_name=device.name, backend=_backend(job, machine, kind, world), nodes=job.cluster.nodes,
        precision=precision, offload=job.memory.offload, compression=job.comm.compression, bucket_mb=job.comm.bucket_mb,
        recompute="none" if job.memory.recompute == "auto" else job.memory.recompute,
    )  # fmt: skip
    if job.parallel == "auto":
        plan = _choose(job, plan, world, memory, reasons)
    else:
        plan = _pin(job.parallel, plan, world)
    plan = _sequence(job, plan, reasons)
    check(job, plan)
    plan = _stages(job, _microbatch(job, plan, memory, reasons), reasons)
    if plan.pp > 1 and (problem := check_schedule(plan.schedule, plan.pp, plan.accumulation, plan.virtual_stages)):
        raise JobError(problem)
    predicted = _predict(job, plan, device)
    return job, replace(plan, reasons=tuple(reasons), predicted=predicted)


def check_fits(job: Job, plan: Plan) -> None:
    """Refuse what cannot fit: the states alone, which are counted exactly, exceed the device."""
    needed = sum(plan.predicted.get(k, 0.0) for k in ("states_gib", "gathered_gib"))
    limit = device_memory(job, _device(job, probe()), probe(), plan.world)
    if needed > limit:
        raise FitError(
            f"weights, gradients and optimizer need {needed:.1f} GiB a rank, but {plan.device_name} has {limit:.1f}; "
            f"use more ranks, or cut more with parallel.zero=3 or a larger parallel.tp"
        )


def device_memory(job: Job, device: Device, machine: Machine, world: int) -> float:
    """GiB a rank may use: what the job says, else the catalog's; CPU ranks share this machine's memory."""
    if job.cluster.memory_gib:
        return job.cluster.memory_gib
    return machine.memory_gib * job.cluster.nodes / world if device.kind == "cpu" else device.memory_gib


def _device(job: Job, machine: Machine) -> Device:
    name = job.cluster.device
    if name in ("auto", "cuda"):
        if machine.gpus:
            return device_by_product(machine.gpus[0].name) or replace(
                find_device("cpu"), name=machine.gpus[0].name, kind="cuda", memory_gib=machine.gpus[0].memory_gib
            )
        if name == "auto":
            return find_device("cpu")
        raise JobError("cluster.device=cuda, but this machine has no NVIDIA GPU; use cluster.device=cpu or auto")
    return find_device(name, job.cluster.catalog)


def _world(job: Job, machine: Machine, device: Device, given: int | None) -> tuple[int, list[str]]:
    """How many ranks: those that were started, else those the cluster names, else what this machine can carry."""
    if given is not None:
        return given, []
    per_node = job.cluster.devices_per_node
    if per_node != "auto":
        return job.cluster.nodes * per_node, []
    pinned, open_axis = 1, True
    if job.parallel != "auto":
        degrees = [getattr(job.parallel, axis) for axis in AXES]
        open_axis = -1 in degrees
        for degree in degrees:
            pinned *= max(1, degree)
    if device.kind != "cpu":
        count = len(machine.gpus) if job.cluster.device in ("auto", "cuda") else 8
        return job.cluster.nodes * (count or 1), []
    if not open_axis:
        return pinned, []
    ranks = max(pinned, min(machine.cores_physical, CPU_RANKS) // pinned * pinned)
    while ranks > pinned and job.train.global_batch % (ranks // pinned):
        ranks -= pinned
    return ranks, [f"{ranks} ranks on this machine's {machine.cores_physical} cores (--nproc sets another number)"]


def _backend(job: Job, machine: Machine, kind: str, world: int) -> str:
    if job.comm.backend != "auto":
        if job.comm.backend == "nccl" and kind == "cpu":
            raise JobError("comm.backend=nccl needs GPUs, and the ranks compute on CPUs; gloo would work")
        return job.comm.backend
    if kind == "cpu":
        return "gloo"
    shared = job.cluster.device in ("auto", "cuda") and job.cluster.nodes == 1 and world > len(machine.gpus)
    return "gloo" if shared else "nccl"


def _pin(given: Parallel, plan: Plan, world: int) -> Plan:
    """The person's degrees, with -1 filled in."""
    degrees = {axis: getattr(given, axis) for axis in AXES}
    explicit_shard = "dp_shard" in given.model_fields_set
    if degrees["dp_replicate"] == -1 and not explicit_shard:
        degrees["dp_shard"] = 1
    rest = [axis for axis, degree in degrees.items() if degree == -1]
    if len(rest) > 1:
        raise JobError(f"parallel.{rest[0]} and parallel.{rest[1]} are both -1; only one axis can take the rest")
    product = 1
    for degree in degrees.values():
        product *= max(1, degree)
    words = " × ".join(f"{a} {d}" for a, d in degrees.items() if d > 1) or "1"
    if rest:
        if world % product:
            near = [d for d in divisors(world) if d <= product]
            raise JobError(
                f"parallel asks for {words} = {product} ranks, which does not divide the {world} there are; "
                f"a product of {near[-1]} would work, or {-(-world // product) * product} ranks (--nproc)"
            )
        degrees[rest[0]] = world // product
    elif product != world:
        raise JobError(
            f"parallel asks for {words} = {product} ranks, but there are {world}; "
            f"set one axis to -1 for the rest, or start {product} ranks (--nproc {product})"
        )
    plan = replace(plan, **degrees, ep=given.ep, zero=given.zero, sequence=given.sequence, schedule=given.schedule)
    if problem := check_schedule(given.schedule, plan.pp, 1, given.virtual_stages):
        raise JobError(problem)
    if plan.pp == 1:
        return plan
    return replace(plan, virtual_stages=given.virtual_stages or SCHEDULES[given.schedule].usual)


def _choose(job: Job, plan: Plan, world: int, memory: float, reasons: list[str]) -> Plan:
    """A good layout: replicas if the states fit beside the activations, else shards, else shards and tp in the node."""
    if world == 1:
        return plan
    batch = job.train.global_batch
    dp = max(d for d in divisors(world) if batch % d == 0)
    tp = world // dp
    counts = count_parameters(job.model)
    if tp > 1 and (job.model.module or any(rule(job, replace(plan, tp=tp)) for rule in TP_RULES)):
        return replace(plan, dp_replicate=world)  # refused for its batch: the person wrote that, and no tp
    plan = replace(plan, tp=tp, sequence=True)
    if tp > 1:
        reasons.append(f"tp {tp}: global_batch {batch} splits over {dp} ranks only")
    whole = replace(plan, dp_replicate=dp)
    states = predict_memory(job, whole).get("states_gib", 0.0) + predict_memory(job, whole).get("gathered_gib", 0.0)
    if dp == 1:
        return plan
    if counts is None or states <= 0.5 * memory:
        reasons.append(
            f"dp_replicate {dp}: a whole copy takes {states:.2f} of {memory:.1f} GiB, and replicas talk least"
        )
        return whole
    reasons.append(f"dp_shard {dp} (zero 3): a whole copy would take {states:.1f} of {memory:.1f} GiB")
    return replace(plan, dp_shard=dp, zero=3)


def _sequence(job: Job, plan: Plan, reasons: list[str]) -> Plan:
    if plan.tp == 1:
        return replace(plan, sequence=False)
    if plan.sequence and job.model.family != "mlp" and job.data.seq_len % plan.tp:
        reasons.append(
            f"norms keep the whole sequence: data.seq_len {job.data.seq_len} does not divide by tp {plan.tp}"
        )
        return replace(plan, sequence=False)
    return plan


def _stages(job: Job, plan: Plan, reasons: list[str]) -> Plan:
    """Which blocks go to which stage: the person's split, or the one whose slowest stage is fastest."""
    if plan.pp == 1:
        return plan
    pinned = job.parallel.split if job.parallel != "auto" else None
    parts = part_costs(job.model, job.data.seq_len)
    ranges = split_stages(parts, plan.pp * plan.virtual_stages, pinned)
    layers = len(parts) - 2
    split = tuple((max(0, a - 1), min(layers, b - 1)) for a, b in ranges)
    if len({b - a for a, b in split}) > 1 and not pinned:
        reasons.append(f"stages of {', '.join(str(b - a) for a, b in split)} blocks: embedding and head weigh too")
    return replace(plan, split=split)


def _pipeline_microbatches(job: Job, plan: Plan) -> int:
    """Enough microbatches to keep the pipeline full, of a number that the schedule takes."""
    given = job.parallel.microbatches if job.parallel != "auto" else "auto"
    if given != "auto":
        return given
    share = job.train.global_batch // plan.dp
    fits = [d for d in divisors(share) if not check_schedule(plan.schedule, plan.pp, d, plan.virtual_stages)]
    return nearest(4 * plan.pp, fits) if fits else share


def _microbatch(job: Job, plan: Plan, memory: float, reasons: list[str]) -> Plan:
    share = job.train.global_batch // plan.dp
    if plan.pp > 1 and job.train.microbatch == "auto" and job.train.accumulation == "auto":
        count = _pipeline_microbatches(job, plan)
        return replace(plan, microbatch=share // count, accumulation=count)
    if job.train.microbatch != "auto":
        return replace(plan, microbatch=job.train.microbatch, accumulation=share // job.train.microbatch)
    if job.train.accumulation != "auto":
        return replace(plan, microbatch=share // job.train.accumulation, accumulation=job.train.accumulation)
    seq = 1 if job.model.family == "mlp" else job.data.seq_len
    candidates = [d for d in reversed(divisors(share)) if d * seq <= MAX_TOKENS] or [1]
    for size in candidates:
        tried = replace(plan, microbatch=size, accumulation=share // size)
        if predict_memory(job, tried).get("memory_gib", 0.0) <= USABLE * memory:
            break
    if size < candidates[0]:
        reasons.append(f"microbatch {size}: {candidates[0]} would not fit in {memory:.1f} GiB")
    return replace(plan, microbatch=size, accumulation=share // size)


def _predict(job: Job, plan: Plan, device: Device) -> dict[str, float]:
    predicted = predict_memory(job, plan)
    moved = sum(communication_bytes(job, plan).values())
    if predicted:
        predicted["communication_mib"] = moved / 2**20
    peak, flops = peak_flops(plan), flops_per_sample(job.model, job.data.seq_len)
    if peak and flops:
        predicted["step_time_s"] = job.train.global_batch * flops / (peak * TYPICAL_MFU * plan.world)
    return predicted


def peak_flops(plan: Plan) -> float | None:
    """The device's dense peak in the plan's precision, FLOP/s, where it is known."""
    try:
        tflops = find_device(plan.device_name).peak_tflops.get(plan.precision)
    except JobError:
        return None
    return tflops * 1e12 if tflops else None


def plan_of(job: Job, world: int | None = None) -> Plan:
    """The Plan of a job."""
    return make_plan(job, world)[1]
