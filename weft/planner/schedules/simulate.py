"""A pipeline's step before it is run: when each rank does what, how long it waits, and what it holds meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.planner.schedules.actions import Action, Fact, Schedule, gives, in_order, messages, needs
from weft.planner.schedules.split import split_stages

__all__ = ["Costs", "Span", "Timeline", "equal_costs", "simulate", "split_stages"]


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) that one microbatch takes in each stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """The whole backward of each stage."""
    input_share: float = 0.5
    """Part of the backward that the gradient of the input takes; the rest is that of the weights."""
    send: float = 0.0
    """From the end of an action to the arrival of its message at another rank."""

    def of(self, action: Action) -> float:
        """How long an action takes."""
        if action.kind == "F":
            return self.forward[action.stage]
        share = {"B": 1.0, "I": self.input_share, "W": 1.0 - self.input_share}[action.kind]
        return self.backward[action.stage] * share


@dataclass(frozen=True)
class Span:
    """One action of one rank, and when it happens."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step as it would go."""

    spans: tuple[Span, ...]
    """By rank, and on each rank by time."""
    length: float
    bubble: float
    """Share of all ranks' time in which they wait."""
    in_flight: tuple[int, ...]
    """Most microbatches whose activations each rank holds at once, summed over its stages."""
    messages: int
    """Activations and gradients that go from one rank to another."""
    idle: tuple[float, ...]
    """How long each rank waits, from the first start to the last end of all."""


def equal_costs(stages: int) -> Costs:
    """Every stage takes 1 forward and 2 backward, and messages take no time: what the formulas of the papers assume."""
    return Costs(forward=(1.0,) * stages, backward=(2.0,) * stages)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Each rank does its list in order, waits for the messages it needs, and sends without waiting."""
    if not len(costs.forward) == len(costs.backward) == schedule.stages:
        raise ValueError(
            f"{schedule.name} has {schedule.stages} stages, but costs of {len(costs.forward)} forwards and "
            f"{len(costs.backward)} backwards were given"
        )
    made: dict[Fact, tuple[int, float]] = {}
    free = [0.0] * schedule.ranks
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for rank, action in in_order(schedule):
        start = free[rank]
        for fact in needs(action, schedule.stages):
            maker, at = made[fact]
            start = max(start, at + (costs.send if maker != rank else 0.0))
        free[rank] = start + costs.of(action)
        made.update({fact: (rank, free[rank]) for fact in gives(action)})
        spans[rank].append(Span(rank, *action, start, free[rank]))
    if any(len(done) < len(actions) for done, actions in zip(spans, schedule.actions, strict=True)):
        raise ValueError(f"{schedule.name}: the ranks wait for one another")
    length = max(free)
    idle = tuple(length - sum(costs.of(a) for a in actions) for actions in schedule.actions)
    return Timeline(
        spans=tuple(span for done in spans for span in done),
        length=length,
        bubble=sum(idle) / (schedule.ranks * length) if length else 0.0,
        in_flight=tuple(_most_held(actions) for actions in schedule.actions),
        messages=sum(len(sent) for sent in messages(schedule).values()),
        idle=idle,
    )


def _most_held(actions: Sequence[Action]) -> int:
    """A forward keeps its activations until the gradients of the weights are made from them."""
    held = most = 0
    for action in actions:
        held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        most = max(most, held)
    return most
