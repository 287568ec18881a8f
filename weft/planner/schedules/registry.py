"""Pipeline schedules by name: what each needs of a job, and the lists of actions it gives."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from weft.job.errors import JobError
from weft.planner.plan import Plan
from weft.planner.schedules.actions import Action, Schedule, messages, validate
from weft.planner.schedules.one_backward import Lists, gpipe, interleaved, naive, one_forward_one_backward
from weft.planner.schedules.zero_bubble import dualpipe_v, zb_h1, zbv

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Schedule",
    "check_schedule",
    "make_schedule",
    "messages",
    "splits",
    "validate",
]


def _zero_bubble(ranks: int, microbatches: int, per_rank: int) -> Lists:
    return (zbv if per_rank == 2 else zb_h1)(ranks, microbatches, per_rank)


@dataclass(frozen=True)
class Kind:
    """A schedule by name: who makes it, how many stages a rank it is meant for, and what it can be made for."""

    make: Callable[[int, int, int], Lists]
    says: str
    """What it does, in a few words."""
    usual: int = 1
    """Stages a rank when parallel.virtual_stages is left out."""
    allowed: tuple[int, ...] | None = None
    """The numbers of stages a rank that work; None: any."""
    splits: bool = False
    """Goes back through a stage twice: for its input, and later for its weights."""


SCHEDULES: dict[str, Kind] = {
    "naive": Kind(naive, "one microbatch at a time, forward and back; one rank works, the others wait"),
    "gpipe": Kind(gpipe, "all forwards, then all backwards"),
    "1f1b": Kind(one_forward_one_backward, "a backward as soon as there is one, so fewer activations wait", 1, (1,)),
    "interleaved-1f1b": Kind(interleaved, "1f1b over several smaller stages a rank, so ranks wait less", 2),
    "zero-bubble": Kind(_zero_bubble, "zb-h1 with one stage a rank, zbv with two", 1, (1, 2), True),
    "zb-h1": Kind(zb_h1, "1f1b with the weight gradients put off into the bubble", 1, (1,), True),
    "zbv": Kind(zbv, "two stages a rank in a V, weight gradients in the bubble", 2, (2,), True),
    "dualpipe-v": Kind(
        dualpipe_v, "two stages a rank in a V, forwards one way paired with backwards the other", 2, (2,), True
    ),
}


def make_schedule(name: str, ranks: int, microbatches: int, virtual_stages: int | None = None) -> Schedule:
    """The schedule of this name; virtual_stages is stages a rank, left out: the schedule's own."""
    problem = check_schedule(name, ranks, microbatches, virtual_stages)
    if problem:
        raise JobError(problem)
    kind = SCHEDULES[name]
    rank_of, lists = kind.make(ranks, microbatches, virtual_stages or kind.usual)
    return Schedule(name, ranks, len(rank_of), microbatches, rank_of, tuple(tuple(actions) for actions in lists))


def splits(plan: Plan) -> bool:
    """Whether a plan's backward passes make the gradients of inputs and of weights apart."""
    return plan.pp > 1 and SCHEDULES[plan.schedule].splits


def check_schedule(name: str, ranks: int, microbatches: int, virtual_stages: int | None = None) -> str | None:
    """None if the schedule can be made; else one sentence with the setting, its value and the nearest that works."""
    kind = SCHEDULES.get(name)
    if kind is None:
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
        return f"parallel.virtual_stages={virtual_stages} must be at least 1; virtual_stages={kind.usual} would work"
    if kind.allowed is None or virtual_stages in kind.allowed:
        return None
    return _wrong_stages(name, kind.allowed, virtual_stages)


def _wrong_stages(name: str, allowed: tuple[int, ...], given: int) -> str:
    words = {1: "one stage", 2: "two stages"}
    few = " or ".join(words[n] for n in allowed)
    fit = min(allowed, key=lambda n: abs(n - given))
    others = {"1f1b": "interleaved-1f1b", "zb-h1": "zbv" if given == 2 else "interleaved-1f1b"}
    other = others.get(name, "zb-h1" if given == 1 else "interleaved-1f1b")
    return (
        f"parallel.schedule={name} takes {few} a rank, not parallel.virtual_stages={given}; "
        f"virtual_stages={fit} would work, or schedule={other}"
    )
