"""The pipeline schedules by name. To add one: write its file, and list it here."""

from __future__ import annotations

import difflib

import numpy as np

from weft.job.errors import JobError
from weft.job.parallel import PIPELINE_SCHEDULES
from weft.planner.plan import Plan
from weft.planner.schedules import dualpipe_v, gpipe, interleaved, naive, one_f_one_b, zb_h1, zbv, zero_bubble
from weft.planner.schedules.actions import Schedule
from weft.planner.schedules.entry import ScheduleEntry

SCHEDULES: dict[str, ScheduleEntry] = {
    module.SCHEDULE.name: module.SCHEDULE
    for module in (one_f_one_b, interleaved, zb_h1, zbv, dualpipe_v, zero_bubble, gpipe, naive)
}
"""Every schedule, the default first."""

for _entry in SCHEDULES.values():
    PIPELINE_SCHEDULES.register(_entry)

SCHEDULE_NAMES: tuple[str, ...] = tuple(name for name, entry in SCHEDULES.items() if not entry.stands_for)
"""Schedules with action lists of their own; arrays of layouts refer to a schedule by its position here."""

LAST_STAGE_ON_FIRST_RANK = np.array([SCHEDULES[name].last_stage_on_first_rank for name in SCHEDULE_NAMES])
"""By the position of a schedule: whether stages go down the ranks and back up."""


def make_schedule(name: str, ranks: int, microbatches: int, virtual_stages: int | None = None) -> Schedule:
    """The action lists of a schedule; `virtual_stages` is stages per rank, by default the schedule's own number."""
    problem = check_schedule(name, ranks, microbatches, virtual_stages)
    if problem:
        raise JobError(problem)
    entry = SCHEDULES[name]
    rank_of, lists = entry.build(ranks, microbatches, virtual_stages or entry.default_stages)
    return Schedule(name, ranks, len(rank_of), microbatches, rank_of, tuple(tuple(actions) for actions in lists))


def resolve_name(name: str, virtual_stages: int) -> str:
    """The schedule that is run: `zero-bubble` is zb-h1 or zbv, by its stages per rank."""
    return SCHEDULES[name].stands_for.get(virtual_stages, name)


def splits_backward(plan: Plan) -> bool:
    """Whether a plan computes the gradients of inputs and of weights separately."""
    return plan.pp > 1 and SCHEDULES[plan.schedule].splits_backward


def check_schedule(name: str, ranks: int, microbatches: int, virtual_stages: int | None = None) -> str | None:
    """None if the schedule can be made; else one sentence with the setting, its value and the nearest that works."""
    entry = SCHEDULES.get(name)
    if entry is None:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(SCHEDULES)} would work"
        return f"parallel.schedule={name} is not a pipeline schedule; {hint}"
    if ranks < 1:
        return f"parallel.pp={ranks} must be at least 1; pp=1 would work"
    if microbatches < 1:
        return f"parallel.microbatches={microbatches} must be at least 1; microbatches=1 would work"
    if virtual_stages is None:
        return None
    if virtual_stages < 1:
        return (
            f"parallel.virtual_stages={virtual_stages} must be at least 1; "
            f"virtual_stages={entry.default_stages} would work"
        )
    if entry.allowed_stages is None or virtual_stages in entry.allowed_stages:
        return None
    return _wrong_stages(entry, entry.allowed_stages, virtual_stages)


def _wrong_stages(entry: ScheduleEntry, allowed: tuple[int, ...], given: int) -> str:
    words = {1: "one stage", 2: "two stages"}
    fit = min(allowed, key=lambda n: abs(n - given))
    others = [
        e
        for e in SCHEDULES.values()
        if e is not entry and (given in (e.allowed_stages or (given,))) and e.searched_stages
    ]
    other = min(others, key=lambda e: (e.splits_backward != entry.splits_backward, e.allowed_stages is None))
    return (
        f"parallel.schedule={entry.name} supports {' or '.join(words[n] for n in allowed)} per rank, not "
        f"parallel.virtual_stages={given}; virtual_stages={fit} would work, or schedule={other.name}"
    )
