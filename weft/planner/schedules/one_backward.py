"""The orders that do not split the backward: naive, GPipe, 1F1B and interleaved 1F1B."""

from __future__ import annotations

from itertools import pairwise

from weft.planner.schedules.actions import Action, loop

Lists = tuple[tuple[int, ...], list[list[Action]]]
"""The rank of each stage, and one list of actions a rank."""


def naive(ranks: int, microbatches: int, per_rank: int) -> Lists:
    """One microbatch at a time, all the way forward and all the way back: only one rank ever works."""
    place = loop(ranks, ranks * per_rank)
    lists: list[list[Action]] = []
    for rank in range(ranks):
        own = range(rank, ranks * per_rank, ranks)
        lists.append([])
        for m in range(microbatches):
            lists[-1] += [Action("F", s, m) for s in own]
            lists[-1] += [Action("B", s, m) for s in reversed(own)]
    return place, lists


def gpipe(ranks: int, microbatches: int, per_rank: int) -> Lists:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    place = loop(ranks, ranks * per_rank)
    lists = []
    for rank in range(ranks):
        own = range(rank, ranks * per_rank, ranks)
        forward = [Action("F", s, m) for s in own for m in range(microbatches)]
        lists.append(forward + [Action("B", s, m) for s in reversed(own) for m in range(microbatches)])
    return place, lists


def one_forward_one_backward(ranks: int, microbatches: int, per_rank: int) -> Lists:
    """1F1B: as many forwards as there are stages below, then one backward for each forward (PipeDream-flush)."""
    lists = []
    for rank in range(ranks):
        forward = [Action("F", rank, m) for m in range(microbatches)]
        backward = [Action("B", rank, m) for m in range(microbatches)]
        lists.append(_alternate(forward, backward, ranks - rank - 1))
    return loop(ranks, ranks), lists


def interleaved(ranks: int, microbatches: int, per_rank: int) -> Lists:
    """1F1B over several stages a rank (Narayanan et al. 2021, arXiv 2104.04473).

    Microbatches go through a rank's stages in groups. The paper takes groups of `ranks`; groups of at least that size
    and as even as can be serve any number of microbatches, with the same bubble.
    """
    if per_rank == 1:
        return one_forward_one_backward(ranks, microbatches, 1)
    count = max(1, microbatches // ranks)
    edges = [microbatches * i // count for i in range(count + 1)]
    groups = [range(a, b) for a, b in pairwise(edges)]
    widest = max(len(g) for g in groups)
    lists = []
    for rank in range(ranks):
        own = range(rank, ranks * per_rank, ranks)
        forward = [Action("F", s, m) for group in groups for s in own for m in group]
        backward = [Action("B", s, m) for group in groups for s in reversed(own) for m in group]
        lists.append(_alternate(forward, backward, 2 * (ranks - rank - 1) + (per_rank - 1) * widest))
    return loop(ranks, ranks * per_rank), lists


def _alternate(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then forward and backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forward))
    steady = [a for pair in zip(forward[ahead:], backward, strict=False) for a in pair]
    return forward[:ahead] + steady + backward[len(forward) - ahead :]
