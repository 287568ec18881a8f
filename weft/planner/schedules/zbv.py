"""ZBV: two stages per rank in a V, weight gradients in the bubble (Qi et al. 2024, arXiv 2401.10241)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from weft.planner.schedules.actions import Action, join_backward, vee
from weft.planner.schedules.entry import ActionLists, ScheduleEntry, Shares, Size, missing


def build(ranks: int, microbatches: int, stages_per_rank: int) -> ActionLists:
    """By list scheduling, with no more activations than 1F1B.

    If forwards, input gradients and weight gradients take equally long, no schedule is shorter than
    6 × microbatches + ranks - 1: the last rank starts after ranks - 1 and is busy from then on. Policies are tried
    until one is within half a percent of this bound.
    """
    bound = 6 * microbatches + ranks - 1
    tried = []
    for flags in product((True, False), repeat=3):
        found = _ListScheduler(ranks, microbatches, *flags).run()
        if found is None:
            continue
        tried.append(found)
        if found[0] <= bound + bound // 200:
            break
    _, lists = min(tried, key=lambda t: t[0])
    return vee(ranks), [join_backward(actions) for actions in lists]


@dataclass(frozen=True)
class _ListScheduler:
    """List scheduling over the V: at each tick each rank does the first possible action of its policy."""

    ranks: int
    microbatches: int
    reserve: bool
    """Reserve one slot for a forward up the V. Without it the ranks may fill up with forwards down and stop."""
    up_first: bool
    """A forward up the V has priority over gradients."""
    first_stage_first: bool
    """Of two gradients, the one nearer to the first stage has priority; otherwise the one nearer to the last."""

    def run(self) -> tuple[int, list[list[Action]]] | None:
        """Number of ticks and the action lists, or None if the ranks fill up and stop."""
        lists: list[list[Action]] = [[] for _ in range(self.ranks)]
        orders = [self._order(rank) for rank in range(self.ranks)]
        done = {kind: [0] * (2 * self.ranks) for kind in "FIW"}
        left = 6 * self.ranks * self.microbatches
        ticks = 0
        while left:
            chosen = [(rank, action) for rank, order in enumerate(orders) if (action := self._choose(order, done))]
            if not chosen:
                return None
            for rank, action in chosen:
                lists[rank].append(action)
                done[action.kind][action.stage] += 1
            left -= len(chosen)
            ticks += 1
        return ticks, lists

    def _order(self, rank: int) -> list[tuple[str, int]]:
        """The kinds of action of a rank, by priority."""
        down, up = rank, 2 * self.ranks - 1 - rank
        gradients = [("I", down), ("I", up)] if self.first_stage_first else [("I", up), ("I", down)]
        first = [("F", up), *gradients] if self.up_first else [*gradients, ("F", up)]
        return [*first, ("F", down), ("W", up), ("W", down)]

    def _choose(self, order: list[tuple[str, int]], done: dict[str, list[int]]) -> Action | None:
        forward, inputs, weights = done["F"], done["I"], done["W"]
        last = 2 * self.ranks - 1
        held = sum(forward[s] - weights[s] for _, s in order[-2:])
        for kind, stage in order:
            # A stage takes its microbatches in order, so a count identifies which are done
            count = done[kind][stage]
            if kind == "F":
                room = 2 * self.ranks - (self.reserve and stage < self.ranks)
                able = held < room and count < (forward[stage - 1] if stage else self.microbatches)
            elif kind == "I":
                able = count < (inputs[stage + 1] if stage < last else forward[stage])
            else:
                able = count < inputs[stage]
            if able:
                return Action(kind, stage, count)
        return None


def _bubble(shares: Shares, ranks: Size, microbatches: Size) -> Size:
    """The order of actions is made for three passes of equal length. With more microbatches than ranks, longer passes
    for inputs than for weights delay every microbatch; the factors were read from simulated steps."""
    few = 2 * shares.inputs - shares.weights + 2 * shares.forward * missing(ranks, microbatches)
    many = 3.2 * np.maximum(0.0, shares.inputs - shares.weights) * microbatches / ranks + shares.weights
    return np.where(microbatches > ranks, many, few)


def _pending(ranks: Size, stages: Size, rank: Size, count: Size) -> Size:
    """With few microbatches no gradient of weights makes room for another forward pass: all of them wait."""
    place = rank / np.maximum(ranks - 1, 1)
    return np.where(count > ranks, 1 + (ranks - 2) * (0.4 + 0.35 * place), (count + 1 + place * (count - 1)) / 2)


SCHEDULE = ScheduleEntry(
    name="zbv",
    description="two stages per rank in a V, weight gradients in the bubble",
    build=build,
    bubble=_bubble,
    in_flight=lambda ranks, stages, rank, count: ranks,
    pending=_pending,
    awaiting_backward=lambda ranks, stages, rank, count: np.minimum(ranks, (count + rank + 1) / 2),
    losses_wait=lambda ranks, stages, rank, count: np.maximum(
        0, np.minimum(count - ranks, np.where(ranks < 5, 1, count))
    ),
    default_stages=2,
    allowed_stages=(2,),
    searched_stages=(2,),
    splits_backward=True,
    last_stage_on_first_rank=True,
)
