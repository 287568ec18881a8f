"""Which rank of ep should hold which expert, and which experts more than one rank, by the load of each.

A move costs once. A copy costs in every pass: its weights come, and their gradients go. So experts are moved first, and
hot ones are copied where that takes more rows off the fullest rank than the copy is worth (`price`, in rows).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from weft.job.schema import Job
from weft.planner.model.facts import ClusterFacts
from weft.planner.plan import Plan

REACHED = 0.5
"""Of a device's peak, what products of experts reach."""
CORE_TFLOPS = 0.05
"""Of a device whose peak nobody has published: a core of a CPU."""

Pairs = tuple[tuple[int, int], ...]
"""Experts, and ranks other than their home that hold a copy."""


@dataclass(frozen=True)
class Placing:
    """Where the experts of a block should be."""

    order: list[int]
    """Which expert should stand at each place; the places of a rank lie together."""
    copies: Pairs
    """By the experts' new numbers."""
    rows: float
    """Of the fullest rank."""
    cost: float
    """Of the copies, in rows."""


def better_order(load: Sequence[float], ranks: int) -> list[int]:
    """Which expert should stand at each place: the hottest first, each to the rank with the least so far and room."""
    room = len(load) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        free = [r for r in range(ranks) if len(held[r]) < room]
        held[min(free, key=lambda r: (sum(load[e] for e in held[r]), r))].append(expert)
    return [expert for each in held for expert in sorted(each)]


def rows_of(load: Sequence[float], ranks: int, copies: Collection[tuple[int, int]] = ()) -> list[float]:
    """Load of each rank, where that of an expert is shared by its home and the copies."""
    room = len(load) // ranks
    shares = [n / (1 + sum(e == expert for e, _ in copies)) for expert, n in enumerate(load)]
    rows = [sum(shares[r * room : (r + 1) * room]) for r in range(ranks)]
    for expert, rank in copies:
        rows[rank] += shares[expert]
    return rows


def fullest(load: Sequence[float], ranks: int, copies: Collection[tuple[int, int]] = ()) -> float:
    """Load of the fullest rank over the mean."""
    rows = rows_of(load, ranks, copies)
    return max(rows) * ranks / max(sum(rows), 1e-9)


def better_copies(load: Sequence[float], ranks: int, room: int, price: float) -> tuple[Pairs, float, float]:
    """The copies, at most `room` on a rank, with which the fullest rank's rows and the copies' cost are least.

    One after the other, the hottest expert of the fullest rank gets a copy on the emptiest rank that may have it.
    Returns the copies, the fullest rank's rows, and what the copies cost.
    """
    pairs: list[tuple[int, int]] = []
    rows = rows_of(load, ranks)
    best: tuple[Pairs, float, float] = (), max(rows), 0.0
    while found := _next_copy(load, ranks, room, pairs, rows):
        pairs.append(found)
        rows = rows_of(load, ranks, pairs)
        cost = price * _most_moved(len(load) // ranks, ranks, pairs)
        if max(rows) + cost < best[1] + best[2]:
            best = tuple(pairs), max(rows), cost
    return best


def cost_of(load: Sequence[float], ranks: int, copies: Collection[tuple[int, int]], price: float) -> float:
    """What a pass takes with these copies: the fullest rank's rows, and what the copies are worth in rows."""
    return max(rows_of(load, ranks, copies)) + price * _most_moved(len(load) // ranks, ranks, copies)


def _next_copy(
    load: Sequence[float], ranks: int, room: int, pairs: list[tuple[int, int]], rows: list[float]
) -> tuple[int, int] | None:
    own = len(load) // ranks
    full = max(range(ranks), key=lambda r: (rows[r], -r))
    holders = {e: {e // own, *(r for x, r in pairs if x == e)} for e in range(len(load))}
    hot = sorted((e for e in holders if full in holders[e]), key=lambda e: (-load[e] / len(holders[e]), e))
    for expert in hot:
        free = [
            r
            for r in range(ranks)
            if r not in holders[expert] and sum(x == r for _, x in pairs) < room and load[expert]
        ]
        if free:
            return expert, min(free, key=lambda r: (rows[r], r))
    return None


def _most_moved(own: int, ranks: int, pairs: Collection[tuple[int, int]]) -> int:
    """Experts that the busiest rank lends or borrows: ranks do so at the same time."""
    lends = [sum(e // own == r for e, _ in pairs) for r in range(ranks)]
    borrows = [sum(x == r for _, x in pairs) for r in range(ranks)]
    return max(*lends, *borrows)


def place(load: Sequence[float], ranks: int, *, moves: bool, room: int, price: float) -> Placing:
    """The best places for a load, in rows; `moves` says whether experts may get other numbers."""
    order = better_order(load, ranks) if moves else list(range(len(load)))
    copies, rows, cost = better_copies([load[e] for e in order], ranks, room, price)
    return Placing(order, copies, rows, cost)


def with_copies(job: Job, plan: Plan, facts: ClusterFacts) -> Plan:
    """The plan with what a rebalancer needs to know, where the person wants one.

    A copy's weights travel once and their gradients once, 2 · matrices · dim · ffn elements. A row less on the fullest
    rank saves 6 · matrices · dim · ffn operations, and four trips of dim elements. dim cancels out.
    """
    e = job.model.experts
    if not plan.ep_rebalance or e is None or job.parallel == "auto" or plan.ep == 1:
        return plan
    inner, outer = facts.levels[0], facts.levels[-1]
    link = (inner if plan.ep <= inner.size else outer).gb_s * 1e9
    flops = REACHED * (facts.peak_tflops.get(plan.precision) or CORE_TFLOPS) * 1e12
    size = 4 if plan.precision == "fp32" else 2
    products = (3 if job.model.activation == "swiglu" else 2) * (e.ffn or 1)
    price = 2 * products * size / link / (6 * products / flops + 4 * size / link)
    room = min(job.parallel.ep_copies, e.count - e.count // plan.ep)  # those of all others
    return replace(plan, ep_copies=room, ep_copy_rows=float(price), ep_moves=e.groups == 1)
