"""The best layout of a job within the space that its settings leave open, with the reasons."""

from __future__ import annotations

from dataclasses import replace

from weft.job.schema import Job
from weft.planner.advice.why import reasons
from weft.planner.estimator import Estimator
from weft.planner.plan import Plan
from weft.planner.rules.arithmetic import divisors
from weft.planner.schedules.known_schedules import resolve_name
from weft.planner.search.branch_and_bound import LayoutSearch, SearchResult
from weft.planner.search.space import Space, job_space


def plan_space(job: Job, plan: Plan, world: int) -> Space:
    """The layouts that the job leaves open. `plan` has the pins."""
    space = job_space(job, world, plan.precision)
    if plan.gradient_home == "released" and space.accumulation is None:
        space = space.restricted(accumulation=1)
    if job.parallel != "auto":
        return _pinned(space, job, plan)
    return _on_cpus(space) if plan.device == "cpu" else space


def _on_cpus(space: Space) -> Space:
    """CPU ranks share one machine's memory and links, so model parallelism gains nothing: use data parallelism."""
    options = [d for d in divisors(space.world) if space.batch % d == 0]
    most = max(d for d in options if space.dp is None or d in space.dp)
    return space.restricted(pp=(1,), cp=(1,), dp=(most,))


def _pinned(space: Space, job: Job, plan: Plan) -> Space:
    """The space with the pinned degrees; what the section leaves open stays open."""
    assert job.parallel != "auto"
    given = job.parallel
    name = resolve_name(plan.schedule, plan.virtual_stages)
    accumulation = space.accumulation if given.microbatches == "auto" else given.microbatches
    return space.restricted(
        tp=(plan.tp,), cp=(plan.cp,), pp=(plan.pp,), ep=(plan.ep,), dp_shard=(plan.dp_shard,),
        dp_replicate=(plan.dp_replicate,), zero=(plan.zero,), cp_style=(plan.cp_style,),
        sequence=plan.sequence, accumulation=accumulation,
        schedules=((name, (plan.virtual_stages,)),), experts=1 if plan.ep > 1 else 0,
    )  # fmt: skip


def search_layout(
    job: Job, plan: Plan, space: Space, estimator: Estimator
) -> tuple[Plan, SearchResult, list[str]] | None:
    """The best layout as a plan, what was found, and why; None where the space is empty."""
    search = LayoutSearch(space, estimator)
    if search.size == 0:
        return None
    found = find_open(job, plan, search)
    if len(found) == 0:
        return keep_pinned(job, plan, found.smallest.plan(0, plan)), found, []
    return (
        keep_pinned(job, plan, found.layouts.plan(0, plan)),
        found,
        reasons(search, found, pinned=job.parallel != "auto"),
    )


def find_open(job: Job, plan: Plan, search: LayoutSearch, top: int = 1, front: bool = False) -> SearchResult:
    """The best layouts that the job leaves open. On CPU ranks plain replicas are taken wherever they fit: shards save
    memory that one machine shares anyway."""
    if plan.device == "cpu" and job.parallel == "auto":
        found = search.find(top, front, dp_shard=(1,))
        if len(found):
            return found
    return search.find(top, front)


def keep_pinned(job: Job, plan: Plan, chosen: Plan) -> Plan:
    """The chosen plan with the job's pinned settings."""
    if job.memory.recompute != "auto":
        chosen = replace(chosen, recompute=plan.recompute)
    if job.parallel == "auto":
        return chosen
    open_ = ("microbatch", "accumulation", "recompute")
    return replace(plan, **{name: getattr(chosen, name) for name in open_})
