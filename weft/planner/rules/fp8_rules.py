"""Rules of fp8."""

from __future__ import annotations

from weft.hardware.catalog import DEVICES
from weft.job.schema import Job
from weft.planner.model.fp8 import fp8_share, fp8_weights
from weft.planner.plan import Plan


def fp8_rule(job: Job, plan: Plan) -> str | None:
    """fp8 needs supported scaling, layer sizes and devices."""
    if job.fp8.amax == "delayed" and job.fp8.scaling == "rowwise":
        return (
            "fp8.amax=delayed and fp8.scaling=rowwise: the rows of one step are not those of the next; "
            "scaling=tensorwise or amax=dynamic would work"
        )
    known = plan.precision == "fp8" and not job.fp8.skip and not job.model.experts
    if known and fp8_share(job, plan) is not None and not fp8_weights(job, plan.tp)[0]:
        over = f" over tp={plan.tp}" if plan.tp > 1 else ""
        return (
            f"precision=fp8 applies to no layer: with model.dim={job.model.dim}{over} no layer's sizes are "
            "multiples of 16; precision=bf16 would work"
        )
    device = DEVICES.get(plan.device_name)
    if plan.precision != "fp8" or device is None or plan.device == "cpu" or device.peak_tflops.get("fp8"):
        return None
    other = "fp16" if device.emulates_bf16 else "bf16"
    return f"precision=fp8 needs fp8 products, which {plan.device_name} does not have; precision={other} would work"
