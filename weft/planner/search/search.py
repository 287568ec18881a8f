"""`search`: the layouts of a job within the space that its settings leave open. Training, plans, advice and refusals
all search here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.hardware.catalog import Device
from weft.job.schema import Job
from weft.planner.calibration import Calibration
from weft.planner.estimator import Estimator, make_estimator
from weft.planner.plan import Plan
from weft.planner.rules.arithmetic import divisors
from weft.planner.schedules.known_schedules import resolve_name
from weft.planner.search.branch_and_bound import LayoutSearch, SearchResult
from weft.planner.search.space import Space, job_space


@dataclass(frozen=True)
class PlanStart:
    """A resolved job before its layout is chosen: its ranks, and a plan with the pinned settings."""

    job: Job
    device: Device
    world: int
    memory_gib: float
    plan: Plan
    reasons: tuple[str, ...] = ()
    spare: bool = False
    """Whether states stay on the device as far as they fit."""
    asked: Job | None = None
    """The job before memory.offload=auto became what it needs."""

    def estimator(self, calibration: Calibration | None = None) -> Estimator:
        """The estimator of its layouts, by default with Weft's own calibration."""
        return make_estimator(self.job, self.plan, self.world, self.device, self.memory_gib, calibration)


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


def search(start: PlanStart, calibration: Calibration | None = None, top: int = 1, front: bool = False) -> SearchResult:
    """The layouts that a job leaves open, the best first: the best of each of the `top` best sets of degrees and, with
    `front`, all that none beats in time and memory. Nothing if none fits; its `size` is 0 if no layout divides the
    batch and the ranks.

    CPU ranks take plain replicas wherever they fit: shards save memory that one machine shares anyway.
    """
    job, plan = start.job, start.plan
    layouts = LayoutSearch(plan_space(job, plan, start.world), start.estimator(calibration))
    if plan.device == "cpu" and job.parallel == "auto":
        replicas = layouts.find(top, front, dp_shard=(1,))
        if len(replicas):
            return replicas
    return layouts.find(top, front)


def keep_pinned(job: Job, plan: Plan, chosen: Plan) -> Plan:
    """The chosen plan with the job's pinned settings."""
    if job.memory.recompute != "auto":
        chosen = replace(chosen, recompute=plan.recompute)
    if job.parallel == "auto":
        return chosen
    open_ = ("microbatch", "accumulation", "recompute")
    return replace(plan, **{name: getattr(chosen, name) for name in open_})
