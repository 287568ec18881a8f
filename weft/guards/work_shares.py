"""Rebalance work from slow ranks to fast ones: when it pays, and which shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.data.sample_order import BatchShares, divide_samples, split_evenly
from weft.planner.plan import Plan

MIN_SAVING = 0.1
"""Share of the compute time that another division must save."""
MIN_REFINED_SAVING = 0.04
"""The same once work has moved, because the first division assumes a time proportional to the samples; doubled with
every refinement, below MIN_SAVING."""
MIN_TIME_LOST_S = 1.0
"""Seconds that must have been lost before work moves."""
MAX_DELAY = 16
"""Limit of the factor by which more time must be lost after each further move, so that work does not follow speeds that
change all the time."""
MAX_MICROBATCH_FACTOR = 2
"""Limit of a fast rank's microbatch, as a multiple of the plan's, where the number of microbatches is fixed."""


@dataclass(frozen=True)
class Limits:
    """Limits of a rank's share under a layout."""

    least: int
    most: int
    parts: int | None
    """Number of microbatches of every rank; None if ranks may differ."""
    microbatch: int


def limits(plan: Plan, global_batch: int) -> Limits:
    """Under replicas and ZeRO 1 only the last microbatch communicates, so ranks may differ in their number. ZeRO 2 and
    3, pipelines, experts and embedding tables that are spread over the ranks need the same number everywhere."""
    only_last_communicates = plan.pp == plan.ep == 1 and not plan.tables and (plan.dp_shard == 1 or plan.zero == 1)
    if only_last_communicates:
        return Limits(1, global_batch, None, plan.microbatch)
    parts = plan.accumulation
    return Limits(parts, MAX_MICROBATCH_FACTOR * plan.microbatch * parts, parts, plan.microbatch)


def shares_of(counts: Sequence[int], limit: Limits) -> BatchShares:
    """The microbatches of every rank for these sample counts."""
    return BatchShares(tuple(split_evenly(count, limit.parts or -(-count // limit.microbatch)) for count in counts))


class Rebalancer:
    """Accumulates the time that a better division would save, and proposes it once enough was lost."""

    def __init__(self, plan: Plan, global_batch: int) -> None:
        self.limits, self.samples = limits(plan, global_batch), global_batch
        self.lost_s = 0.0
        self.moves = 0
        """Divisions since the work was divided evenly."""

    def better(self, shares: BatchShares, busy: Sequence[float]) -> BatchShares | None:
        """A better division if work should move now. `busy` is the compute time of each data-parallel rank lately."""
        counts, saved = self._divide(shares, busy)
        self.lost_s = self.lost_s + saved if saved >= MIN_SAVING * max(busy) else 0.0
        least = MIN_TIME_LOST_S * min(MAX_DELAY, 2 ** max(0, self.moves - 2))
        return self._move(counts) if counts and self.lost_s >= least else None

    def refined(self, shares: BatchShares, busy: Sequence[float]) -> BatchShares | None:
        """A small correction of a division. `busy` is over a longer time, in which single late steps do not matter."""
        counts, saved = self._divide(shares, busy) if self.moves else ((), 0.0)
        least = MIN_REFINED_SAVING * 2 ** (self.moves - 1)
        return self._move(counts) if counts and MIN_SAVING > least <= saved / max(busy) else None

    def _divide(self, shares: BatchShares, busy: Sequence[float]) -> tuple[Sequence[int], float]:
        """The best counts, and the seconds that they save in a step; none if nothing can move."""
        seconds = [time / count for time, count in zip(busy, shares.counts, strict=True)]
        if min(seconds) <= 0:
            return (), 0.0
        try:
            counts = divide_samples(self.samples, seconds, self.limits.least, self.limits.most)
        except ValueError:
            return (), 0.0
        return counts, max(busy) - max(s * n for s, n in zip(seconds, counts, strict=True))

    def _move(self, counts: Sequence[int]) -> BatchShares:
        self.lost_s = 0.0
        self.moves = self.moves + 1 if len(set(counts)) > 1 else 0
        return shares_of(counts, self.limits)
