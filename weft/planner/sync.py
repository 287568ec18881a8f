"""Plans whose replicas synchronise less often than every step (train.sync): their traffic, memory and limits."""

from __future__ import annotations

from dataclasses import replace

from weft.job.import_by_name import find_object
from weft.job.schema import Job, Parallel
from weft.planner.engine_constants import QUANTIZATION_BLOCK, QUANTIZATION_SCALE_BYTES
from weft.planner.model.counts import count_parameters
from weft.planner.model.fp8 import delayed_scales
from weft.planner.plan import Plan

_SCALE = QUANTIZATION_SCALE_BYTES / QUANTIZATION_BLOCK
EXCHANGE_BYTES = {"none": 4.0, "int8": 2 * (1 + _SCALE), "int4": 2 * (0.5 + _SCALE)}
"""Bytes a rank sends per parameter in an exchange; quantized values are sent twice (reduce-scatter, all-gather)."""


def one_replica(plan: Plan) -> Plan:
    """The plan of one replica between exchanges; the plan itself where gradients are summed every step."""
    return plan if plan.sync in ("step", "predict") else replace(plan, dp_replicate=1, sync="step")


def exchange_bytes(job: Job, plan: Plan) -> dict[str, float]:
    """Average bytes that a rank sends per step for exchanges between replicas, by axis."""
    counts = count_parameters(job.model)
    if counts is None or plan.sync in ("step", "predict"):
        return {}
    function = job.train.sync.entry.exchange_bytes
    here = counts.total / (plan.tp * plan.pp * plan.dp_shard * plan.cp_cut)
    sent: dict[str, float] = find_object(function, "train.sync")(job, plan, here)
    return sent


def weight_exchange_bytes(job: Job, plan: Plan, parameters: float) -> dict[str, float]:
    """Replicas average their weights every few steps."""
    return {"dp_replicate": parameters * EXCHANGE_BYTES[job.train.sync.quantize] / plan.sync_every}


def default_layout(job: Job) -> Job:
    """The default layout for independent replicas: one replica per node, or one per rank."""
    if job.train.sync.mode == "step" or job.parallel != "auto":
        return job
    nodes = job.cluster.nodes if job.train.sync.entry.period > 1 and not job.train.sync.entry.starts_processes else 1
    layout = Parallel(dp_replicate=nodes, dp_shard=-1) if nodes > 1 else Parallel(dp_replicate=-1, dp_shard=1)
    return job.model_copy(update={"parallel": layout})


def sync_rule(job: Job, plan: Plan) -> str | None:
    """Why a job's train.sync mode cannot be used with its other settings; None where it can."""
    sync = job.train.sync
    if sync.mode == "step":
        return None
    name = f"train.sync={sync.mode}"
    if (plan.alone or sync.mode == "predict") and plan.dp_replicate == 1:
        ways = "parallel.dp_replicate=2" if plan.world > 1 else "2 ranks (--nproc 2) with parallel.dp_replicate=2"
        return f"{name} is an exchange between replicas, and there is one; {ways} or train.sync=step would work"
    if not plan.alone and plan.world > plan.dp_replicate:
        return (
            f"{name} trains with whole copies of the model, and the layout is {plan.layout()}; "
            "parallel.dp_replicate=-1 would work"
        )
    if job.model.experts is not None:
        return (
            f"model.experts are balanced by the load that all ranks see, and under {name} they do not wait for each "
            "other; train.sync=step would work"
        )
    if plan.precision == "fp16":
        return (
            f"precision=fp16 scales the loss by what every rank saw, and under {name} they do not wait for each other; "
            "precision=bf16 would work"
        )
    if plan.precision == "fp8" and delayed_scales(job):
        return (
            f"fp8.amax=delayed scales by what every rank saw, and under {name} they do not wait for each other; "
            "amax=dynamic would work"
        )
    if sync.mode != "predict" and plan.compression != "none" and plan.dp_shard == 1:
        instead = "train.sync.quantize=int8" if plan.alone else "comm.compression=none"
        return (
            f"comm.compression={plan.compression} is for the gradients of every step, and {name} sends none between "
            f"replicas; {instead} would work"
        )
    if not plan.alone and job.data.record_ids:
        return f"data.record_ids is of ranks, and under {name} workers come and go; record_ids=false would work"
    if not sync.entry.rule:
        return None
    reason: str | None = find_object(sync.entry.rule, "train.sync")(job, plan)
    return reason


def predict_rule(job: Job, plan: Plan) -> str | None:
    """Why `train.sync=predict` cannot be used with other settings of a job."""
    if plan.compression != "none":
        return (
            f"comm.compression={plan.compression} is summed within a step, and train.sync=predict waits for sums in "
            "the next one; compression=none would work"
        )
    if job.comm.allreduce not in ("auto", "native"):
        return (
            f"comm.allreduce={job.comm.allreduce} passes messages on only while a rank waits, and train.sync=predict "
            "computes meanwhile; allreduce=auto would work"
        )
    return None
