"""Settings of a layout: pinned degrees, sequence and context parallelism, chunks, stages, microbatch, compiling."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from math import gcd

from weft.hardware.catalog import Device, Network, find_device, find_network
from weft.job.errors import JobError
from weft.job.schema import Experts, Job, Parallel
from weft.planner.describe import run_lengths
from weft.planner.memory.long_sequences import chunk_tokens, host_gib
from weft.planner.memory.stage_blocks import split_blocks
from weft.planner.plan import AXES, Plan
from weft.planner.rules.arithmetic import asked_ranks, divisors
from weft.planner.schedules.known_schedules import SCHEDULES, check_schedule
from weft.planner.search.candidates import Layouts
from weft.planner.search.space import MAX_MICROBATCH_TOKENS
from weft.planner.time.context import choose_style, rings
from weft.planner.tower_layout import tower_rows

MICROBATCHES_OF_A_STAGE = 4
"""Microbatches for each rank of a pipeline by default, of a custom module: idle time is then below a fifth."""


def _network(job: Job) -> Network:
    return find_network("ib-ndr" if job.cluster.network == "auto" else job.cluster.network, job.cluster.catalog)


def pin_degrees(given: Parallel, plan: Plan, world: int, experts: Experts | None = None) -> Plan:
    """The pinned degrees with -1 resolved; ep=-1 takes the most ranks that divide the experts."""
    degrees = {axis: getattr(given, axis) for axis in AXES}
    explicit_shard = "dp_shard" in given.model_fields_set
    if degrees["dp_replicate"] == -1 and not explicit_shard:
        degrees["dp_shard"] = 1
    if given.towers and not {"dp_replicate", "dp_shard"} & given.model_fields_set:
        degrees |= {"dp_replicate": -1, "dp_shard": 1}
    rest = [axis for axis, degree in degrees.items() if degree == -1]
    if len(rest) > 1:
        raise JobError(f"parallel.{rest[0]} and parallel.{rest[1]} are both -1; only one axis can take the rest")
    product, words = asked_ranks(degrees)
    if rest:
        if world % product:
            below = max(d for d in divisors(world) if d < product)
            near = " or ".join(str(d) for d in (below, *[d for d in divisors(world) if d > product][:1]))
            raise JobError(
                f"parallel asks for {words} = {product} ranks, which does not divide the {world} there are; "
                f"a product of {near} would work, or {-(-world // product) * product} ranks (--nproc)"
            )
        degrees[rest[0]] = world // product
    elif product != world:
        raise JobError(
            f"parallel asks for {words} = {product} ranks, but there are {world}; "
            f"set one axis to -1 for the rest, or start {product} ranks (--nproc {product})"
        )
    over = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    ep = given.ep if given.ep != -1 else gcd(over, experts.count) if experts else 1
    node = world // plan.nodes
    hop = node if given.ep_exchange == "two-hop" and ep > node > 1 and ep % node == 0 else 1
    plan = replace(
        plan,
        **degrees,
        ep=ep,
        ep_hop=hop,
        ep_overlap=given.ep_overlap,
        ep_rebalance=given.ep_rebalance,
        zero=given.zero,
        sequence=given.sequence,
        schedule=given.schedule,
        towers=tower_rows(given.towers, world),
    )
    if problem := check_schedule(given.schedule, plan.pp, 1, given.virtual_stages):
        raise JobError(problem)
    if plan.pp == 1:
        return plan
    return replace(plan, virtual_stages=given.virtual_stages or SCHEDULES[given.schedule].default_stages)


def compiles(job: Job, plan: Plan) -> bool:
    """By default on GPUs, for Weft's models and layouts without collectives inside a block."""
    if job.train.compile != "auto":
        return job.train.compile
    if job.model.module and (not job.model.family or (job.model.batch_norm == "all" and plan.dp > 1)):
        return False
    if job.data.pads_batches:  # it would compile for each length
        return False
    return plan.device == "cuda" and not job.model.takes_vectors and plan.tp == plan.cp == 1


def choose_sequence_parallel(job: Job, plan: Plan, reasons: list[str]) -> Plan:
    if plan.tp == 1 or job.model.takes_vectors:
        return replace(plan, sequence=False)
    if plan.sequence and plan.cp == 1 and job.data.seq_len % plan.tp:
        reasons.append(
            f"norms keep the whole sequence: data.seq_len {job.data.seq_len} does not divide by tp {plan.tp}"
        )
        return replace(plan, sequence=False)
    return plan


def choose_precision(job: Job, device: Device, reasons: list[str]) -> str:
    """The precision: pinned, or fp32 on CPUs and bf16 on GPUs; fp16 where a GPU lacks bf16 and the job allows fp16."""
    devices = [device, *(find_device(group.device, job.cluster.catalog) for group in job.cluster.also)]
    slow = next((d for d in devices if d.emulates_bf16), None)
    if job.precision not in ("auto", "bf16") or device.kind == "cpu":
        return "fp32" if job.precision == "auto" else job.precision
    if slow is None:
        return "bf16"
    rates = f"at {slow.tflops_of('bf16'):g} instead of {slow.tflops_of('fp16'):g} TFLOP/s"
    allowed = job.train.sync.mode == "step" and job.memory.homes.get("gradients", "device") == "device"
    if job.precision == "auto" and allowed and all(d.peak_tflops.get("fp16") for d in devices):
        reasons.append(f"fp16: {slow.name} has no bf16 products and would compute them in fp32, {rates}")
        return "fp16"
    reasons.append(f"{slow.name} has no bf16 products and computes them in fp32, {rates}; precision=fp16 is faster")
    return "bf16"


def choose_context_parallel(job: Job, plan: Plan, device: Device, reasons: list[str]) -> Plan:
    """The context-parallel style: pinned, or chosen from heads, links and sequence length."""
    if plan.cp == 1 or not job.model.heads or not job.model.kv_heads:
        return plan
    heads, kv = max(1, job.model.heads // plan.tp), max(1, job.model.kv_heads // plan.tp)
    style: str = job.parallel.cp_style if job.parallel != "auto" else plan.cp_style
    if style == "auto":
        in_node = max(1, plan.world // plan.nodes // plan.tp)
        link = device.link_gb_s if plan.cp <= in_node else min(device.link_gb_s, _network(job).gb_s)
        flops = (device.tflops_of(plan.precision) or 1.0) * 1e12
        tokens = job.data.seq_len / plan.cp
        style, group, why = choose_style(
            plan.cp, in_node, heads, kv, tokens, plan.compute_bytes, flops, link * 1e9, job.model.has_source
        )
        reasons.append(f"cp by {style}: {why}")
    else:
        group = rings(style, plan.cp, heads, kv)[1]
    # an encoder-decoder computes all scores of its queries at once, so that the order of tokens does not matter
    zigzag = bool(job.model.causal) and not job.model.has_source and plan.cp > group
    return replace(plan, cp_style=style, cp_group=group, zigzag=zigzag)


def choose_chunks(job: Job, plan: Plan, reasons: list[str]) -> Plan:
    """Whether a block's linear layers run in chunks, and how much host memory is used."""
    layouts = Layouts.one(plan)
    chunk = int(chunk_tokens(job, layouts)[0])
    if chunk and job.memory.chunk == "auto":
        tokens = job.data.seq_len / plan.cp
        reasons.append(f"blocks in chunks of {chunk} tokens: {tokens:.0f} on a rank make large activations")
    host = float(host_gib(job, layouts)[0])
    return replace(plan, chunk=chunk, host_gib=host if plan.offloads_activations else 0.0)


def choose_stages(job: Job, plan: Plan, reasons: list[str]) -> Plan:
    """Which blocks each stage has: the pinned split, or the one with the fastest slowest stage."""
    if plan.pp == 1:
        return plan
    if job.model.module:  # its parts are known when it is built
        return replace(plan, split=_pinned_parts(job, plan))
    split = split_blocks(job, plan.pp * plan.virtual_stages, pairs=plan.tp > 1)
    pinned = job.parallel.split if job.parallel != "auto" else None
    if len({b - a for a, b in split}) > 1 and not pinned and not job.model.takes_vectors:
        reasons.append(f"stages of {run_lengths([b - a for a, b in split])} blocks: embedding and head weigh too")
    return replace(plan, split=split)


def _pinned_parts(job: Job, plan: Plan) -> tuple[tuple[int, int], ...]:
    """The parts of each stage as parallel.split pins them; empty if it does not."""
    pinned = job.parallel.split if job.parallel != "auto" else None
    stages = plan.pp * plan.virtual_stages
    if pinned is None:
        return ()
    if len(pinned) != stages or min(pinned) < 1:
        raise JobError(
            f"parallel.split={pinned} must have {stages} numbers from 1 up: parallel.pp × parallel.virtual_stages "
            "makes so many stages, and each has a part of the module"
        )
    return tuple(pairwise([0, *accumulate(pinned)]))


def choose_microbatch(job: Job, plan: Plan) -> Plan:
    """For a custom module: the pinned microbatch, else the largest up to MAX_MICROBATCH_TOKENS."""
    share = job.train.global_batch // plan.dp
    if job.train.microbatch != "auto":
        return replace(plan, microbatch=job.train.microbatch, accumulation=share // job.train.microbatch)
    pinned = job.parallel.microbatches if job.parallel != "auto" else "auto"
    if (given := job.train.accumulation if pinned == "auto" else pinned) != "auto":
        return replace(plan, microbatch=share // given, accumulation=given)
    if job.model.loss == "contrastive":  # samples are compared within a microbatch
        return replace(plan, microbatch=share, accumulation=1)
    if plan.pp > 1:
        filled = [d for d in divisors(share) if d >= MICROBATCHES_OF_A_STAGE * plan.pp]
        return replace(plan, microbatch=share // min(filled, default=share), accumulation=min(filled, default=share))
    length = 1 if job.model.tables else job.data.seq_len
    size = max([d for d in divisors(share) if d * length <= MAX_MICROBATCH_TOKENS], default=1)
    return replace(plan, microbatch=size, accumulation=share // size)
