"""Rules of context parallelism."""

from __future__ import annotations

from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.planner.rules.arithmetic import divisors, either
from weft.planner.time.context import ulysses_fits


def attends(job: Job) -> bool:
    """Whether the model is one of Weft's transformers; an mlp may have the heads of a shape but no attention."""
    return not job.model.module and not job.model.takes_vectors


def sequence_rule(job: Job, plan: Plan) -> str | None:
    """cp needs a model with a sequence dimension."""
    if plan.cp == 1 or attends(job):
        return None
    what = job.model.module or f"model.family={job.model.family}"
    return (
        f"parallel.cp={plan.cp} splits the sequence, and {what} has no known sequence dimension; use "
        "dp_replicate or dp_shard"
    )


def cp_style_rule(job: Job, plan: Plan) -> str | None:
    """ulysses and hybrid need enough heads for the ranks of cp."""
    heads, kv = job.model.heads, job.model.kv_heads
    if plan.cp == 1 or not attends(job) or not heads or not kv or plan.cp_style not in ("ulysses", "hybrid"):
        return None
    own, own_kv = max(1, heads // plan.tp), max(1, kv // plan.tp)
    of_rank = f"model.heads={heads} and model.kv_heads={kv}" + (f" over tp={plan.tp}" if plan.tp > 1 else "")
    if plan.cp_style == "hybrid" and plan.cp_group == 1:
        return (
            f"parallel.cp_style=hybrid with cp={plan.cp} and {of_rank} leaves no group between one rank and all of "
            "them; cp_style=ring would work"
        )
    if plan.cp_style == "ulysses" and not ulysses_fits(plan.cp, own, own_kv):
        fit = [d for d in divisors(own) if ulysses_fits(d, own, own_kv)]
        return (
            f"parallel.cp_style=ulysses cannot divide {of_rank} among cp={plan.cp} ranks; cp={either(fit)} would work, "
            "or cp_style=ring"
        )
    return None
