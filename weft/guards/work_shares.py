"""Moving work from slow ranks to fast ones: when it pays, and into which shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.data.batch_shares import BatchShares, divide_samples, split_evenly
from weft.planner.plan import Plan

WORTH = 0.1
"""Of a step's computing, what another division must save."""
PATIENCE_S = 1.0
"""Time that must have been lost before work moves: a rank that is slow for a moment is left alone."""
LARGER = 2
"""Times the plan's microbatch that a fast rank may compute at once, where microbatches must be as many everywhere."""


@dataclass(frozen=True)
class Limits:
    """What a layout lets a rank take."""

    least: int
    most: int
    parts: int | None
    """Microbatches that every rank must have; None where each may have its own number."""
    microbatch: int


def limits(plan: Plan, global_batch: int) -> Limits:
    """Under replicas and zero 1 only the last microbatch of a step talks to others: ranks may differ in their number.
    Zero 2 and 3 and a pipeline's schedule take every microbatch together."""
    alone = plan.pp == 1 and (plan.dp_shard == 1 or plan.zero == 1)
    if alone:
        return Limits(1, global_batch, None, plan.microbatch)
    parts = plan.accumulation
    return Limits(parts, LARGER * plan.microbatch * parts, parts, plan.microbatch)


def shares_of(counts: Sequence[int], limit: Limits) -> BatchShares:
    """The microbatches of every rank, for so many samples each."""
    return BatchShares(tuple(split_evenly(count, limit.parts or -(-count // limit.microbatch)) for count in counts))


class Balance:
    """Watches how much a better division would save, and asks for it once enough was lost."""

    def __init__(self, plan: Plan, global_batch: int) -> None:
        self.limits, self.samples = limits(plan, global_batch), global_batch
        self.lost_s = 0.0

    def better(self, shares: BatchShares, busy: Sequence[float]) -> BatchShares | None:
        """Another division, if work should move now. `busy` is how long each data-parallel rank computes in a step."""
        seconds = [time / count for time, count in zip(busy, shares.counts, strict=True)]
        if min(seconds) <= 0:
            return None
        try:
            counts = divide_samples(self.samples, seconds, self.limits.least, self.limits.most)
        except ValueError:  # nothing can move
            return None
        saved = max(busy) - max(s * n for s, n in zip(seconds, counts, strict=True))
        if saved < WORTH * max(busy):
            self.lost_s = 0.0
            return None
        self.lost_s += saved
        if self.lost_s < PATIENCE_S:
            return None
        self.lost_s = 0.0
        return shares_of(counts, self.limits)
