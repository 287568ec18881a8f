"""Pipeline actions, the schedule made of them, and the check that a schedule is complete and free of deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One pass of one microbatch through one stage."""

    kind: str
    """F: forward. B: whole backward. I: gradient of the input only. W: gradient of the weights only."""
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """One ordered list of actions per rank. The executor and the simulator read the same lists."""

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
    """Round-robin placement: stage s is on rank s % ranks."""
    return tuple(s % ranks for s in range(stages))


def vee(ranks: int) -> tuple[int, ...]:
    """V placement, two stages per rank: rank r holds stages r and 2 × ranks - 1 - r."""
    return (*range(ranks), *reversed(range(ranks)))


Result = tuple[str, int, int]
"""What an action produces: the output ("F"), the gradient of the input ("I") or of the weights ("W") of a stage."""


def results_of(action: Action) -> tuple[Result, ...]:
    """The results of an action."""
    kinds = ("I", "W") if action.kind == "B" else (action.kind,)
    return tuple((kind, action.stage, action.microbatch) for kind in kinds)


def needs(action: Action, stages: int) -> tuple[Result, ...]:
    """The results that an action needs, from its own rank or another."""
    kind, stage, microbatch = action
    if kind == "F":
        return () if stage == 0 else (("F", stage - 1, microbatch),)
    if kind == "W":
        return (("I", stage, microbatch),)
    own: Result = ("F", stage, microbatch)
    return (own,) if stage == stages - 1 else (own, ("I", stage + 1, microbatch))


def messages(schedule: Schedule) -> dict[tuple[int, int], tuple[Result, ...]]:
    """Messages between ranks, by (sender, receiver), in sending order.

    V schedules may need them in another order, since activations and gradients travel in the same direction; over an
    ordered channel the receiver takes them as they are sent.
    """
    sent: dict[tuple[int, int], list[Result]] = {}
    for rank, actions in enumerate(schedule.actions):
        for kind, stage, microbatch in actions:
            to = stage + 1 if kind == "F" else stage - 1
            if kind == "W" or not 0 <= to < schedule.stages or schedule.rank_of[to] == rank:
                continue
            sent.setdefault((rank, schedule.rank_of[to]), []).append(("F" if kind == "F" else "I", stage, microbatch))
    return {pair: tuple(results) for pair, results in sent.items()}


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Every (rank, action) in an order that satisfies all dependencies; ends early if the ranks are deadlocked."""
    known: set[Result] = set()
    waiting: dict[Result, int] = {}
    position = [0] * schedule.ranks
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        actions = schedule.actions[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            missing = next((r for r in needs(action, schedule.stages) if r not in known), None)
            if missing is not None:
                waiting[missing] = rank
                break
            position[rank] += 1
            for result in results_of(action):
                known.add(result)
                if result in waiting:
                    ready.append(waiting.pop(result))
            yield rank, action


def validate(schedule: Schedule) -> None:
    """Raise ValueError unless every action runs exactly once without deadlock, given non-blocking sends."""
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
        raise ValueError(f"{schedule.name}: deadlock: {'; '.join(stuck)}")


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
    """Check that each forward and backward (whole or in halves) exists once, on the rank that holds the stage."""
    counts: Counter[Result] = Counter()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind not in KINDS:
                raise ValueError(f"{schedule.name}: rank {rank} has an action of unknown kind {action.kind!r}")
            if not (0 <= action.stage < schedule.stages and 0 <= action.microbatch < schedule.microbatches):
                raise ValueError(f"{schedule.name}: rank {rank} has {action}, which does not exist")
            if schedule.rank_of[action.stage] != rank:
                home = schedule.rank_of[action.stage]
                raise ValueError(f"{schedule.name}: rank {rank} has {action}, but that stage is on rank {home}")
            counts.update(results_of(action))
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
    """Check that a rank produces its own results before it uses them."""
    known: set[Result] = set()
    for action in actions:
        for result in needs(action, schedule.stages):
            if schedule.rank_of[result[1]] == rank and result not in known:
                raise ValueError(
                    f"{schedule.name}: rank {rank} has {action} before the {Action(*result)} that it needs"
                )
        known.update(results_of(action))


def join_backward(actions: Sequence[Action]) -> list[Action]:
    """Join adjacent halves of a backward in the first stage into one: no other rank waits for its input gradient."""
    out: list[Action] = []
    for action in actions:
        if out and action.stage == 0 and action.kind == "W" and out[-1] == action._replace(kind="I"):
            out[-1] = action._replace(kind="B")
        else:
            out.append(action)
    return out
