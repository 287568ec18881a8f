"""A plan's pipeline as the simulator sees it: its schedule, and what each stage costs."""

from __future__ import annotations

from weft.job.errors import JobError
from weft.job.schema import Job
from weft.planner.model.counts import part_costs
from weft.planner.plan import Plan
from weft.planner.rules.arithmetic import divisors
from weft.planner.schedules.known_schedules import make_schedule
from weft.planner.schedules.simulate import Costs, Timeline, simulate

BACKWARD = 2.0
"""A backward pass multiplies twice what the forward pass did: for the input and for the weights."""


def stage_costs(job: Job, plan: Plan, unit: float = 1.0) -> Costs:
    """Forward and backward of each stage, from its FLOPs; `unit` is what the average stage takes forward. Stages of a
    custom module, whose FLOPs are not known, count alike."""
    if job.model.module:
        even = (unit,) * (plan.pp * plan.virtual_stages)
        return Costs(forward=even, backward=tuple(BACKWARD * f for f in even))
    parts = part_costs(job.model, job.data.seq_len)
    last = len(plan.split) - 1
    raw = []
    for i, (first, end) in enumerate(plan.split):
        cost = sum(parts[1 + first : 1 + end])
        raw.append(cost + (parts[0] if i == 0 else 0.0) + (parts[-1] if i == last else 0.0))
    scale = unit * len(raw) / sum(raw)
    forward = tuple(c * scale for c in raw)
    return Costs(forward=forward, backward=tuple(BACKWARD * f for f in forward))


def simulated(job: Job, plan: Plan, unit: float = 1.0) -> Timeline:
    """The time line of one step as the plan predicts it."""
    if plan.pp == 1:
        options = [f"parallel.pp={degree} would make one" for degree in divisors(plan.world)[1:2]]
        raise JobError("; ".join(["this plan has no pipeline to draw", *options]))
    schedule = make_schedule(plan.schedule, plan.pp, plan.accumulation, plan.virtual_stages)
    return simulate(schedule, stage_costs(job, plan, unit))
