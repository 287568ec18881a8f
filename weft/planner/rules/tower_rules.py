"""Rules of models with several towers."""

from __future__ import annotations

from weft.job.schema import Job
from weft.job.train import RETRIEVAL_METRICS
from weft.planner.plan import Plan
from weft.planner.rules.arithmetic import divisors, either


def towers_rule(job: Job, plan: Plan) -> str | None:
    """Towers have layouts of their own, of data and tensor parallelism, in runs that synchronise every step."""
    if not plan.towers:
        return None
    names, model = [row["name"] for row in plan.towers], job.model
    if not model.module:
        return (
            f"parallel.towers spreads submodules of clip or of your own module, and model.family={model.family} has "
            "one layout; leave it out"
        )
    if model.towers and (unknown := [name for name in names if name not in model.towers]):
        return f"parallel.towers names {unknown[0]}, and the model has {', '.join(model.towers)}; use these names"
    if nested := [(a, b) for a in names for b in names if a != b and b.startswith(f"{a}.")]:
        return f"parallel.towers names {nested[0][0]} and {nested[0][1]} inside of it; leave one out"
    for axis in ("tp", "cp", "pp", "ep"):
        if (degree := getattr(plan, axis)) > 1:
            own = "give each tower its tp" if axis == "tp" else f"{axis}=1 would work"
            return f"parallel.towers and parallel.{axis}={degree}: towers have layouts of their own; {own}"
    if model.tables:
        return "parallel.towers does not support model.tables; leave parallel.towers out"
    if plan.compression != "none":
        return f"parallel.towers does not support comm.compression={plan.compression}; compression=none would work"
    if job.train.sync.mode != "step":
        return f"parallel.towers does not support train.sync={job.train.sync.mode}; sync=step would work"
    if plan.tiered:
        return (
            "parallel.towers does not support states outside of the device or in fewer bytes; memory.offload=none and "
            "memory.states=exact would work"
        )
    if job.data.pads_batches:
        return f"parallel.towers exchanges samples of one length, and data.format={job.data.format} has others"
    for row in plan.towers:
        if (shape := model.towers.get(row["name"])) is not None and shape.heads % row["tp"]:
            return (
                f"parallel.towers.{row['name']}.tp={row['tp']} does not divide its heads={shape.heads}; "
                f"tp={either(divisors(shape.heads))} would work"
            )
    return None


def retrieval_rule(job: Job, plan: Plan) -> str | None:
    """Metrics of two towers need their vectors, and other metrics a model's outputs for targets."""
    contrastive = job.model.loss == "contrastive"
    for name in job.train.metrics:
        if name in RETRIEVAL_METRICS and not contrastive:
            return f"train.metrics={name} compares the vectors of two towers, of model.loss=contrastive; leave it out"
        if contrastive and name not in (*RETRIEVAL_METRICS, "perplexity") and ":" not in name:
            return (
                f"train.metrics={name} compares outputs with targets, and model.loss=contrastive has vectors; "
                "recall_at_1 and zero_shot would work"
            )
    return None
