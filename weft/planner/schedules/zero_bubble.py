"""The orders that split the backward in two and fill the bubble with weight gradients: ZB-H1, ZBV, DualPipe-V."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from weft.planner.schedules.actions import Action, loop, vee
from weft.planner.schedules.one_backward import Lists


def zb_h1(ranks: int, microbatches: int, per_rank: int) -> Lists:
    """1F1B whose rank r puts off r weight gradients to its end (Qi et al. 2024, arXiv 2401.10241).

    Each rank then holds at most `ranks` microbatches, as the first one does in 1F1B.
    """
    lists = []
    for rank in range(ranks):
        ahead = min(ranks - rank, microbatches)
        actions = [Action("F", rank, m) for m in range(ahead)]
        for m in range(microbatches):
            actions.append(Action("I", rank, m))
            if m >= rank:
                actions.append(Action("W", rank, m - rank))
            if m + ahead < microbatches:
                actions.append(Action("F", rank, m + ahead))
        actions += [Action("W", rank, m) for m in range(max(0, microbatches - rank), microbatches)]
        lists.append(_joined(actions))
    return loop(ranks, ranks), lists


def zbv(ranks: int, microbatches: int, per_rank: int) -> Lists:
    """Two stages a rank in a V, no more activations than 1F1B (same paper), by list scheduling.

    For forwards, input and weight gradients of one length nothing can take less than 6 × microbatches + ranks - 1: the
    last rank starts after ranks - 1 and then never rests. Policies are tried until one gets there, or within half a
    percent, which only long schedules leave room for.
    """
    bound = 6 * microbatches + ranks - 1
    tried = []
    for flags in product((True, False), repeat=3):
        found = _Greedy(ranks, microbatches, *flags).run()
        if found is None:
            continue
        tried.append(found)
        if found[0] <= bound + bound // 200:
            break
    _, lists = min(tried, key=lambda t: t[0])
    return vee(ranks), [_joined(actions) for actions in lists]


def dualpipe_v(ranks: int, microbatches: int, per_rank: int) -> Lists:
    """DualPipe folded into a V: forwards down are paired with backwards up (DeepSeek-V3, arXiv 2412.19437).

    The order is made for at least 2 × ranks microbatches; with fewer, those that do not exist are left out of it, and
    what is left is still in an order that works.
    """
    lists = [_dualpipe_rank(ranks, rank, max(microbatches, 2 * ranks)) for rank in range(ranks)]
    return vee(ranks), [_joined([a for a in actions if a.microbatch < microbatches]) for actions in lists]


def _dualpipe_rank(ranks: int, rank: int, microbatches: int) -> list[Action]:
    below = ranks - rank - 1
    stages = (rank, 2 * ranks - 1 - rank)
    actions: list[Action] = []
    late: list[Action] = []
    forwards, backwards = [0, 0], [0, 0]

    def do(word: str) -> None:
        """F0 F1: a forward down or up the V; B0 B1: a backward; I0 I1: its first half; W: the oldest second half."""
        if word == "W":
            actions.append(late.pop(0))
            return
        kind, side = word[0], int(word[1])
        count = forwards if kind == "F" else backwards
        actions.append(Action(kind, stages[side], count[side]))
        if kind == "I":
            late.append(Action("W", stages[side], count[side]))
        count[side] += 1

    def repeat(times: int, words: str) -> None:
        for _ in range(times):
            for word in words.split():
                do(word)

    repeat(2 * below, "F0")
    repeat(rank + 1, "F0 F1")
    repeat(below, "I1 W F1")
    repeat(microbatches - 2 * ranks + rank + 1, "F0 B1 F1 B0")
    repeat(below, "B1 F1 B0")
    # The second half of these leaves its weight gradients for the time when only the other ranks have backwards
    for i in range(2 * (rank + 1)):
        do(("I" if i > rank else "B") + ("0" if i % 2 else "1"))
    repeat(below, "W I0")
    repeat(len(late), "W")
    return actions


@dataclass(frozen=True)
class _Greedy:
    """List scheduling over the V: at each tick each rank does the first thing of its policy that it can."""

    ranks: int
    microbatches: int
    reserve: bool
    """Keep one place for a forward up the V. Without it the ranks may fill up with forwards down and stop."""
    up_first: bool
    """A forward up the V goes before everything else; otherwise gradients do."""
    first_stage_first: bool
    """Of two gradients the one nearer to the first stage goes first; otherwise the one nearer to the last."""

    def run(self) -> tuple[int, list[list[Action]]] | None:
        """The ticks it takes and the lists, or None where the ranks fill up and stop."""
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
        """What a rank would rather do, the best first."""
        down, up = rank, 2 * self.ranks - 1 - rank
        gradients = [("I", down), ("I", up)] if self.first_stage_first else [("I", up), ("I", down)]
        first = [("F", up), *gradients] if self.up_first else [*gradients, ("F", up)]
        return [*first, ("F", down), ("W", up), ("W", down)]

    def _choose(self, order: list[tuple[str, int]], done: dict[str, list[int]]) -> Action | None:
        forward, inputs, weights = done["F"], done["I"], done["W"]
        last = 2 * self.ranks - 1
        held = sum(forward[s] - weights[s] for _, s in order[-2:])
        for kind, stage in order:
            # Every stage takes its microbatches in order, so that a count says which of them are done
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


def _joined(actions: list[Action]) -> list[Action]:
    """Halves of a backward that follow each other in the first stage as one: no rank waits for what lies between."""
    out: list[Action] = []
    for action in actions:
        if out and action.stage == 0 and action.kind == "W" and out[-1] == action._replace(kind="I"):
            out[-1] = action._replace(kind="B")
        else:
            out.append(action)
    return out
