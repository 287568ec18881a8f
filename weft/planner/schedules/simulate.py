"""Simulation of a pipelined step: the time line of each rank, its idle time, and the activations it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.planner.schedules.actions import Action, Result, Schedule, in_order, messages, needs, results_of


@dataclass(frozen=True)
class Costs:
    """Time that one microbatch takes in each stage, in any unit."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """The whole backward of each stage."""
    input_share: float = 0.5
    """Share of the backward spent on the gradient of the input; the rest is spent on that of the weights."""
    send: float = 0.0
    """Time from the end of an action to the arrival of its message at another rank."""

    def of(self, action: Action) -> float:
        """Duration of an action."""
        if action.kind == "F":
            return self.forward[action.stage]
        share = {"B": 1.0, "I": self.input_share, "W": 1.0 - self.input_share}[action.kind]
        return self.backward[action.stage] * share


@dataclass(frozen=True)
class Span:
    """One action of one rank, with its start and end time."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    spans: tuple[Span, ...]
    """By rank, and on each rank by time."""
    length: float
    bubble: float
    """Idle share of all ranks' time."""
    in_flight: tuple[int, ...]
    """Largest number of microbatches whose activations each rank holds at once, summed over its stages."""
    messages: int
    """Number of activations and gradients sent between ranks."""
    idle: tuple[float, ...]
    """Idle time of each rank between the first start and the last end of all ranks."""


def equal_costs(stages: int) -> Costs:
    """1 for a forward and 2 for a backward of every stage, messages free: the assumption of the papers' formulas."""
    return Costs(forward=(1.0,) * stages, backward=(2.0,) * stages)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run each rank's list in order; an action waits for the messages it needs, and sends do not block."""
    if not len(costs.forward) == len(costs.backward) == schedule.stages:
        raise ValueError(
            f"{schedule.name} has {schedule.stages} stages, but costs of {len(costs.forward)} forwards and "
            f"{len(costs.backward)} backwards were given"
        )
    made: dict[Result, tuple[int, float]] = {}
    free = [0.0] * schedule.ranks
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for rank, action in in_order(schedule):
        start = free[rank]
        for result in needs(action, schedule.stages):
            maker, at = made[result]
            start = max(start, at + (costs.send if maker != rank else 0.0))
        free[rank] = start + costs.of(action)
        made.update({result: (rank, free[rank]) for result in results_of(action)})
        spans[rank].append(Span(rank, *action, start, free[rank]))
    if any(len(done) < len(actions) for done, actions in zip(spans, schedule.actions, strict=True)):
        raise ValueError(f"{schedule.name}: deadlock")
    length = max(free)
    idle = tuple(length - sum(costs.of(a) for a in actions) for actions in schedule.actions)
    return Timeline(
        spans=tuple(span for done in spans for span in done),
        length=length,
        bubble=sum(idle) / (schedule.ranks * length) if length else 0.0,
        in_flight=tuple(_max_held(actions) for actions in schedule.actions),
        messages=sum(len(sent) for sent in messages(schedule).values()),
        idle=idle,
    )


def _max_held(actions: Sequence[Action]) -> int:
    """Activations of a forward are held until the gradients of the weights are computed."""
    held = largest = 0
    for action in actions:
        held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        largest = max(largest, held)
    return largest
