"""DualPipe-V: DualPipe folded into a V (DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

import numpy as np

from weft.planner.schedules.actions import Action, join_backward, vee
from weft.planner.schedules.entry import ActionLists, ScheduleEntry, Shares, Size, missing


def build(ranks: int, microbatches: int, stages_per_rank: int) -> ActionLists:
    """Forwards down the V are paired with backwards up.

    The order is made for at least 2 × ranks microbatches; with fewer, the actions of those that do not exist are left
    out, and the rest is still a valid order.
    """
    lists = [_actions_of_rank(ranks, rank, max(microbatches, 2 * ranks)) for rank in range(ranks)]
    return vee(ranks), [join_backward([a for a in actions if a.microbatch < microbatches]) for actions in lists]


def _actions_of_rank(ranks: int, rank: int, microbatches: int) -> list[Action]:
    below = ranks - rank - 1
    stages = (rank, 2 * ranks - 1 - rank)
    actions: list[Action] = []
    delayed: list[Action] = []
    forwards, backwards = [0, 0], [0, 0]

    def add(code: str) -> None:
        """F0 F1: a forward down or up the V; B0 B1: a backward; I0 I1: its first half; W: the oldest second half."""
        if code == "W":
            actions.append(delayed.pop(0))
            return
        kind, side = code[0], int(code[1])
        count = forwards if kind == "F" else backwards
        actions.append(Action(kind, stages[side], count[side]))
        if kind == "I":
            delayed.append(Action("W", stages[side], count[side]))
        count[side] += 1

    def repeat(times: int, codes: str) -> None:
        for _ in range(times):
            for code in codes.split():
                add(code)

    repeat(2 * below, "F0")
    repeat(rank + 1, "F0 F1")
    repeat(below, "I1 W F1")
    repeat(microbatches - 2 * ranks + rank + 1, "F0 B1 F1 B0")
    repeat(below, "B1 F1 B0")
    # The second half of these delays its weight gradients until only the other ranks have backwards
    for i in range(2 * (rank + 1)):
        add(("I" if i > rank else "B") + ("0" if i % 2 else "1"))
    repeat(below, "W I0")
    repeat(len(delayed), "W")
    return actions


def _bubble(shares: Shares, ranks: Size, microbatches: Size) -> Size:
    """Below two microbatches a rank, gradients of weights do not fill the bubble."""
    filled = np.clip(3 - 2 * microbatches / ranks, -1, 1)
    return 2 * shares.inputs + shares.weights * filled + 2 * shares.forward * missing(ranks, microbatches)


SCHEDULE = ScheduleEntry(
    name="dualpipe-v",
    description="two stages per rank in a V, forwards in one direction paired with backwards in the other",
    build=build,
    bubble=_bubble,
    in_flight=lambda ranks, stages, rank, count: np.minimum(ranks + 0.5, (count + rank + 1) / 2),
    losses_wait=lambda ranks, stages, rank, count: np.maximum(0, count - ranks),
    default_stages=2,
    allowed_stages=(2,),
    searched_stages=(2,),
    splits_backward=True,
    last_stage_on_first_rank=True,
)
