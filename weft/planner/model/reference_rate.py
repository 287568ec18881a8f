"""The FLOPs of a step and the reference FLOP/s for MFU."""

from __future__ import annotations

from weft.hardware.catalog import find_device
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.planner.model.counts import flops_per_sample
from weft.planner.model.fp8 import blended_peak, fp8_share
from weft.planner.plan import Plan


def step_flops(job: Job) -> float:
    """The model's FLOPs in a step of all ranks."""
    return (flops_per_sample(job.model, job.data.seq_len) or 0.0) * job.train.global_batch


def mfu_peak_flops(plan: Plan, job: Job) -> float | None:
    """FLOP/s of a rank that a run counts as an MFU of 1: as its plan did, so that both figures can be compared."""
    mfu, seconds = plan.predicted.get("mfu"), plan.predicted.get("step_time_s")
    if (peak := peak_flops(plan, job)) or not mfu or not seconds:
        return peak
    return step_flops(job) / (mfu * seconds * plan.world)


def peak_flops(plan: Plan, job: Job) -> float | None:
    """The device's dense peak in the plan's precision, FLOP/s, where it is known; in fp8 a blend of both peaks."""
    try:
        device = find_device(plan.device_name, job.cluster.catalog)
    except JobError:
        return None
    tflops = device.tflops_of(plan.precision)
    share = fp8_share(job, plan) if plan.precision == "fp8" else None
    if tflops and share is not None and (bf16 := device.tflops_of("bf16")):
        tflops = blended_peak(tflops, bf16, share)
    return tflops * 1e12 if tflops else None
