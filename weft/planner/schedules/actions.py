"""What a pipeline rank does: actions, the schedule made of them, and the proof that it can be carried out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One thing a rank does with one microbatch in one of its stages."""

    kind: str
    """F forward, B the whole backward, I the backward for the input only, W the backward for the weights only."""
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """One list of actions a rank, in the order in which it does them. The executor and the simulator read the same."""

    name: str
    ranks: int
    stages: int
    microbatches: int
    rank_of: tuple[int, ...]
    """The pipeline rank that holds each stage."""
    actions: tuple[tuple[Action, ...], ...]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the model."""
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)


def loop(ranks: int, stages: int) -> tuple[int, ...]:
    """Stages dealt out in turn: stage s is on rank s % ranks."""
    return tuple(s % ranks for s in range(stages))


def vee(ranks: int) -> tuple[int, ...]:
    """Two stages a rank, down and back up: rank r holds stages r and 2 × ranks - 1 - r."""
    return (*range(ranks), *reversed(range(ranks)))


Fact = tuple[str, int, int]
"""What an action brings about: the output ("F"), the gradient of the input ("I") or of the weights ("W") of a stage."""


def gives(action: Action) -> tuple[Fact, ...]:
    """What is known once an action is done."""
    kinds = ("I", "W") if action.kind == "B" else (action.kind,)
    return tuple((kind, action.stage, action.microbatch) for kind in kinds)


def needs(action: Action, stages: int) -> tuple[Fact, ...]:
    """What must be known before an action can begin, on its own rank or on another."""
    kind, stage, microbatch = action
    if kind == "F":
        return () if stage == 0 else (("F", stage - 1, microbatch),)
    if kind == "W":
        return (("I", stage, microbatch),)
    own: Fact = ("F", stage, microbatch)
    return (own,) if stage == stages - 1 else (own, ("I", stage + 1, microbatch))


def messages(schedule: Schedule) -> dict[tuple[int, int], tuple[Fact, ...]]:
    """What goes from one rank to another, by (from, to), in the order in which it is sent.

    The V schedules may need it in another order than that, since activations and gradients go the same way; over a
    channel that keeps its order the receiver must take them as they are sent.
    """
    sent: dict[tuple[int, int], list[Fact]] = {}
    for rank, actions in enumerate(schedule.actions):
        for kind, stage, microbatch in actions:
            to = stage + 1 if kind == "F" else stage - 1
            if kind == "W" or not 0 <= to < schedule.stages or schedule.rank_of[to] == rank:
                continue
            sent.setdefault((rank, schedule.rank_of[to]), []).append(("F" if kind == "F" else "I", stage, microbatch))
    return {pair: tuple(facts) for pair, facts in sent.items()}


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Every (rank, action) in an order in which it can happen; it ends early where the ranks wait for one another."""
    known: set[Fact] = set()
    waiting: dict[Fact, int] = {}
    position = [0] * schedule.ranks
    able = list(range(schedule.ranks))
    while able:
        rank = able.pop()
        actions = schedule.actions[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            missing = next((f for f in needs(action, schedule.stages) if f not in known), None)
            if missing is not None:
                waiting[missing] = rank
                break
            position[rank] += 1
            for fact in gives(action):
                known.add(fact)
                if fact in waiting:
                    able.append(waiting.pop(fact))
            yield rank, action


def validate(schedule: Schedule) -> None:
    """Raise ValueError unless ranks that receive when they must and send without waiting can do every action once."""
    _check_shape(schedule)
    _check_complete(schedule)
    for rank, actions in enumerate(schedule.actions):
        _check_own_order(schedule, rank, actions)
    done = Counter(rank for rank, _ in in_order(schedule))
    stuck = [
        f"rank {rank} waits in {actions[done[rank]]}"
        for rank, actions in enumerate(schedule.actions)
        if done[rank] < len(actions)
    ]
    if stuck:
        raise ValueError(f"{schedule.name}: the ranks wait for one another: {'; '.join(stuck)}")


def _check_shape(schedule: Schedule) -> None:
    if len(schedule.rank_of) != schedule.stages or len(schedule.actions) != schedule.ranks:
        raise ValueError(
            f"{schedule.name}: {schedule.stages} stages on {schedule.ranks} ranks, but {len(schedule.rank_of)} stages "
            f"are placed and {len(schedule.actions)} ranks have a list"
        )
    idle = [r for r in range(schedule.ranks) if r not in schedule.rank_of]
    if idle or not all(0 <= r < schedule.ranks for r in schedule.rank_of):
        raise ValueError(f"{schedule.name}: stages are placed on ranks {schedule.rank_of} of {schedule.ranks}")


def _check_complete(schedule: Schedule) -> None:
    """Every forward and every backward once, whole or in its two halves, on the rank that holds the stage."""
    counts: Counter[Fact] = Counter()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind not in KINDS:
                raise ValueError(f"{schedule.name}: rank {rank} has an action of unknown kind {action.kind!r}")
            if not (0 <= action.stage < schedule.stages and 0 <= action.microbatch < schedule.microbatches):
                raise ValueError(f"{schedule.name}: rank {rank} has {action}, which does not exist")
            if schedule.rank_of[action.stage] != rank:
                home = schedule.rank_of[action.stage]
                raise ValueError(f"{schedule.name}: rank {rank} has {action}, but that stage is on rank {home}")
            counts.update(gives(action))
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            for kind in ("F", "I", "W"):
                found = counts[kind, stage, microbatch]
                if found != 1:
                    name = Action(kind, stage, microbatch)
                    raise ValueError(
                        f"{schedule.name}: {name} {'is missing' if not found else f'is there {found} times'}"
                    )


def _check_own_order(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    """What a rank makes for itself it makes before it needs it: no other rank can help it out of that."""
    known: set[Fact] = set()
    for action in actions:
        for fact in needs(action, schedule.stages):
            if schedule.rank_of[fact[1]] == rank and fact not in known:
                raise ValueError(f"{schedule.name}: rank {rank} has {action} before the {Action(*fact)} that it needs")
        known.update(gives(action))
