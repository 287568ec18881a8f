"""Rules of recompute, offload and chunks."""

from __future__ import annotations

from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.planner.rules.context_rules import attends
from weft.planner.schedules.registry import splits_backward


def offload_rule(job: Job, plan: Plan) -> str | None:
    """Activation offload and chunks need a transformer and an undivided backward pass."""
    if not plan.long:
        return None
    setting = "memory.offload=activations" if plan.offload == "activations" else f"memory.chunk={plan.chunk}"
    if not attends(job):
        what = job.model.module or f"model.family={job.model.family}"
        return (
            f"{setting} works on a transformer's blocks, and {what} is not a transformer; memory.recompute=full would "
            "work"
        )
    if splits_backward(plan):
        return (
            f"{setting} computes a block's gradients in one pass, and parallel.schedule={plan.schedule} splits them; "
            "schedule=1f1b would work"
        )
    if job.memory.recompute not in ("auto", "full") and (job.memory.offload == "activations" or job.memory.chunk):
        return (
            f"memory.recompute={job.memory.recompute} has no effect with {setting}, which already recomputes most of "
            "a block; recompute=auto would work"
        )
    return None


def recompute_rule(job: Job, plan: Plan) -> str | None:
    """memory.recompute fits the model, the budget and the schedule."""
    asked, layers = job.memory.recompute, job.model.layers
    if isinstance(asked, int) and layers and asked > layers:
        return f"memory.recompute={asked}, but the model has {layers} blocks; recompute=full recomputes them all"
    if job.memory.budget_gib and asked != "auto":
        return (
            f"memory.budget_gib={job.memory.budget_gib:g} chooses the recompute, and memory.recompute={asked} sets "
            "it; leave one of them out"
        )
    if job.memory.budget_gib and job.model.module:
        return "memory.budget_gib needs one of Weft's models, whose memory is known; set memory.recompute instead"
    if plan.recompute == "selective" and splits_backward(plan):
        return (
            f"parallel.schedule={plan.schedule} runs a block's backward twice, for its input and for its weights, "
            "and memory.recompute=selective keeps outputs for one pass; recompute=full or schedule=1f1b would work"
        )
    return None
