"""Rules of fp8."""

from __future__ import annotations

from weft.hardware.catalog import DEVICES
from weft.job.schema import Job
from weft.planner.engine_constants import FP8_ALIGNMENT
from weft.planner.model.fp8 import fp8_share
from weft.planner.plan import Plan


def fp8_rule(job: Job, plan: Plan) -> str | None:
    """fp8 needs supported scaling, layer sizes and devices."""
    if job.fp8.amax == "delayed" and job.fp8.scaling == "rowwise":
        return (
            "fp8.amax=delayed and fp8.scaling=rowwise: the rows of one step are not those of the next; "
            "scaling=tensorwise or amax=dynamic would work"
        )
    if plan.precision == "fp8" and not job.fp8.skip and not job.model.experts and fp8_share(job, plan) == 0:
        over = f" over tp={plan.tp}" if plan.tp > 1 else ""
        return (
            f"precision=fp8 applies to no layer: with model.dim={job.model.dim}{over} no layer's sizes are "
            "multiples of 16; precision=bf16 would work"
        )
    if plan.precision == "fp8" and job.fp8.head and (why := _fp8_head(job, plan)):
        return why
    device = DEVICES.get(plan.device_name)
    if plan.precision != "fp8" or device is None or plan.device == "cpu" or device.peak_tflops.get("fp8"):
        return None
    other = "fp16" if device.emulates_bf16 else "bf16"
    return f"precision=fp8 needs fp8 products, which {plan.device_name} does not have; precision={other} would work"


def _fp8_head(job: Job, plan: Plan) -> str | None:
    if job.model.is_encoder:
        return f"fp8.head=true and model.family={job.model.family}, whose head has a bias; fp8.head=false would work"
    vocab, dim, each = job.model.vocab or 0, job.model.dim or 0, FP8_ALIGNMENT * plan.tp
    if not vocab:
        return "fp8.head=true and a model without a vocabulary; fp8.head=false would work"
    if not vocab % each and not dim % FP8_ALIGNMENT:
        return None
    over = f" over tp={plan.tp}" if plan.tp > 1 else ""
    other = "" if dim % FP8_ALIGNMENT else f"model.vocab={-(-vocab // each) * each} or "
    return (
        f"fp8.head=true and model.vocab={vocab}{over}, model.dim={dim}: the head's sizes must be multiples of "
        f"{FP8_ALIGNMENT}; {other}fp8.head=false would work"
    )
