"""Placement of experts on the ranks of ep by their load, with copies of busy experts on several ranks.

A move costs once; a copy costs in every pass, because its weights are sent and their gradients returned. So experts are
moved first, and busy ones are copied if that takes more rows off the busiest rank than the copy costs (`price`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from weft.job.schema import Job
from weft.planner.model.cluster_facts import ClusterFacts
from weft.planner.plan import Plan

EXPERT_EFFICIENCY = 0.5
"""Share of the device's peak that the experts' matrix products reach."""
CORE_TFLOPS = 0.05
"""Peak of a device without a published one, such as a CPU core."""

Pairs = tuple[tuple[int, int], ...]
"""Pairs of an expert and a rank that holds a copy of it."""


@dataclass(frozen=True)
class ExpertPlacement:
    """The placement of a block's experts."""

    order: list[int]
    """The expert of each slot; the slots of a rank are adjacent."""
    copies: Pairs
    """Copies, by the experts' new numbers."""
    rows: float
    """Rows of the busiest rank."""
    cost: float
    """Cost of the copies, in rows."""


def better_order(load: Sequence[float], ranks: int) -> list[int]:
    """The expert of each slot: greedily, the busiest expert first, each to the least loaded rank with a free slot."""
    room = len(load) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        free = [r for r in range(ranks) if len(held[r]) < room]
        held[min(free, key=lambda r: (sum(load[e] for e in held[r]), r))].append(expert)
    return [expert for each in held for expert in sorted(each)]


def rows_of(load: Sequence[float], ranks: int, copies: Collection[tuple[int, int]] = ()) -> list[float]:
    """Load of each rank; the load of an expert is divided among its owner and the copies."""
    room = len(load) // ranks
    shares = [n / (1 + sum(e == expert for e, _ in copies)) for expert, n in enumerate(load)]
    rows = [sum(shares[r * room : (r + 1) * room]) for r in range(ranks)]
    for expert, rank in copies:
        rows[rank] += shares[expert]
    return rows


def fullest(load: Sequence[float], ranks: int, copies: Collection[tuple[int, int]] = ()) -> float:
    """Load of the busiest rank over the mean."""
    rows = rows_of(load, ranks, copies)
    return max(rows) * ranks / max(sum(rows), 1e-9)


def better_copies(load: Sequence[float], ranks: int, room: int, price: float) -> tuple[Pairs, float, float]:
    """The copies, at most `room` on a rank, that minimise the busiest rank's rows plus the cost of the copies.

    Repeatedly, the busiest expert of the busiest rank gets a copy on the least loaded rank that may hold it. Returns
    the copies, the busiest rank's rows, and the cost of the copies.
    """
    pairs: list[tuple[int, int]] = []
    rows = rows_of(load, ranks)
    best: tuple[Pairs, float, float] = (), max(rows), 0.0
    while found := _next_copy(load, ranks, room, pairs, rows):
        pairs.append(found)
        rows = rows_of(load, ranks, pairs)
        cost = price * _max_transfers(len(load) // ranks, ranks, pairs)
        if max(rows) + cost < best[1] + best[2]:
            best = tuple(pairs), max(rows), cost
    return best


def cost_of(load: Sequence[float], ranks: int, copies: Collection[tuple[int, int]], price: float) -> float:
    """Cost of a pass with these copies: the busiest rank's rows, plus the copies in rows."""
    return max(rows_of(load, ranks, copies)) + price * _max_transfers(len(load) // ranks, ranks, copies)


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


def _max_transfers(own: int, ranks: int, pairs: Collection[tuple[int, int]]) -> int:
    """Largest number of experts that one rank sends or receives; ranks do so at the same time."""
    sent = [sum(e // own == r for e, _ in pairs) for r in range(ranks)]
    received = [sum(x == r for _, x in pairs) for r in range(ranks)]
    return max(*sent, *received)


def place(load: Sequence[float], ranks: int, *, moves: bool, room: int, price: float) -> ExpertPlacement:
    """The best placement for a load in rows; with `moves`, experts may be renumbered."""
    order = better_order(load, ranks) if moves else list(range(len(load)))
    copies, rows, cost = better_copies([load[e] for e in order], ranks, room, price)
    return ExpertPlacement(order, copies, rows, cost)


def with_copies(job: Job, plan: Plan, facts: ClusterFacts) -> Plan:
    """The plan with the settings of the expert rebalancer, if the job sets one.

    A copy sends its weights and their gradients, 2 · matrices · dim · ffn elements. One row less on the busiest rank
    saves 6 · matrices · dim · ffn operations and four transfers of dim elements; dim cancels out.
    """
    e = job.model.experts
    if not plan.ep_rebalance or e is None or job.parallel == "auto" or plan.ep == 1:
        return plan
    inner, outer = facts.levels[0], facts.levels[-1]
    link = (inner if plan.ep <= inner.size else outer).gb_s * 1e9
    flops = EXPERT_EFFICIENCY * (facts.peak_tflops.get(plan.precision) or CORE_TFLOPS) * 1e12
    size = plan.compute_bytes
    products = (3 if job.model.gated else 2) * (e.ffn or 1)
    price = 2 * products * size / link / (6 * products / flops + 4 * size / link)
    room = min(job.parallel.ep_copies, e.count - e.count // plan.ep)  # experts of all other ranks
    return replace(plan, ep_copies=room, ep_copy_rows=float(price), ep_moves=e.groups == 1)
