"""The response to slow ranks and slow links: warn, rebalance the batch, or replace the rank."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

from weft.data.loader import Loader
from weft.data.sample_order import BatchShares
from weft.guards.fault_log import FaultLog
from weft.guards.slow_links import SlowLinkDetector, shortest_wait
from weft.guards.step_report import RankFigures
from weft.guards.straggler_detection import REFINE_SPAN_S, RankTimes, SlowRank
from weft.guards.work_shares import MIN_TIME_LOST_S, Rebalancer
from weft.job.schema import Job
from weft.mesh import PARTS_OF_AXIS, Mesh
from weft.planner.plan import Plan

LOST_DECAY = 0.9
"""Decay of the accumulated lost time after each step without a slow rank."""
SUPERVISED_VARIABLE = "WEFT_SLOT"
"""Set in the environment of a rank that a supervisor can replace."""


class StragglerResponse:
    """Step times of all ranks, and the batch shares that follow from them."""

    def __init__(self, job: Job, plan: Plan, mesh: Mesh, faults: FaultLog, fixed: Callable[[], bool]):
        """fixed: shares must stay equal, as do those of local replicas, which have their own batches."""
        self.settings, self.plan, self.mesh, self.faults = job.resilience, plan, mesh, faults
        self._fixed = fixed
        self.same_rows = job.model.loss == "contrastive" or bool(plan.towers)  # ranks exchange samples' vectors
        self.other_work = any(row["ranks"] < plan.world for row in plan.towers)  # ranks hold different towers
        self.links_of = {axis: self._groups(set(PARTS_OF_AXIS.get(axis, (axis,)))) for axis in mesh.axes}
        self.shares = BatchShares.even(job.train.global_batch, plan.microbatch, plan.dp)
        self.balance = Rebalancer(plan, job.train.global_batch)
        self.times, self.links = RankTimes(mesh.world), SlowLinkDetector()
        self.loader: Loader | None = None
        self.slow: int | None = None
        self.lost_s = 0.0
        self.seconds: list[float] = []

    def attach(self, loader: Loader) -> Loader:
        """Set the loader whose shares may change."""
        self.loader = loader
        loader.shares = self.shares
        return loader

    def check(self, step: int, now: int, rows: list[RankFigures]) -> None:
        """Add a step's figures and respond; `now` is the last completed step."""
        seconds = max(row.busy + row.data + sum(row.waited) for row in rows)  # clocks differ a little
        self.seconds = [*self.seconds[-63:], seconds]
        usual = statistics.median(self.seconds)
        shortest = {
            (axis, group): shortest_wait([rows[r] for r in group], i)
            for i, axis in enumerate(self.links_of)
            for group in self.links_of[axis]
        }
        for link in self.links.add(usual, shortest):
            where = "–".join(map(str, link.ranks))
            why = (
                f"messages on {link.axis} between ranks {where} take {1e3 * link.now_s:.0f} ms a step instead of "
                f"{1e3 * link.usual_s:.0f} ms: the link between them is slow"
            )
            self.faults.fault("slow_link", step, why, axis=link.axis, ranks=list(link.ranks))
        self.times.add(seconds, *([getattr(row, name) for row in rows] for name in ("busy", "delay", "idle")))
        self._slow_rank(step, now)

    def _slow_rank(self, step: int, now: int) -> None:
        if self.other_work:
            return
        uneven = len(set(self.shares.counts)) > 1
        slow = None if uneven else self.times.slow()  # with uneven shares, longer compute time is expected
        if not uneven and (slow is None or slow.rank != self.slow):  # short episodes do not add up
            self.lost_s, self.balance.lost_s = LOST_DECAY * self.lost_s, LOST_DECAY * self.balance.lost_s
        if slow is not None and slow.rank != self.slow:
            self.slow = slow.rank
            why = f"rank {slow.rank} computes {slow.ratio:.1f} times as long as the others"
            self.faults.fault("slow_rank", step, why, slow.rank, ratio=round(slow.ratio, 3))
        if slow is not None and self.settings.evict_slow and SUPERVISED_VARIABLE in os.environ:
            self._evict(slow)
        typical = self.times.typical()
        if not typical or not (uneven or slow) or not self.settings.rebalance:
            return
        if self.plan.dp == 1 or self.plan.alone or self.same_rows or self._fixed():
            return
        better = self.balance.better(self.shares, self._by_share(typical))
        if better is None and (typical := self.times.typical(REFINE_SPAN_S)):
            better = self.balance.refined(self.shares, self._by_share(typical))
        if better is not None:
            self._reshare(now, better)

    def _evict(self, slow: SlowRank) -> None:
        """After a second was lost, the slow rank exits and the supervisor replaces it."""
        self.lost_s += slow.lost_s
        if self.lost_s > MIN_TIME_LOST_S and slow.rank == self.mesh.rank:
            raise OSError(
                f"this rank computes {slow.ratio:.1f} times as long as the others: resilience.evict_slow is on"
            )

    def _by_share(self, busy: list[float]) -> list[float]:
        """Compute time of each data-parallel rank: that of its slowest member."""
        out = [0.0] * self.plan.dp
        for coords, seconds in zip(self.faults.coords, busy, strict=True):
            at = coords.get("dp_replicate", 0) * self.plan.dp_shard + coords.get("dp_shard", 0)
            out[at] = max(out[at], seconds)
        return out

    def _reshare(self, now: int, shares: BatchShares) -> None:
        before, self.shares = self.shares.counts, shares
        self.times.forget()
        self.slow = None
        if self.loader is not None:
            self.loader.shares = shares
        self.faults.recovered("slow_rank", "rebalance", now + 1, was=list(before), shares=list(shares.counts))
        self.faults.warn(
            f"sequences of a step are redistributed over the ranks, {list(shares.counts)} after {list(before)}"
        )

    def _groups(self, within: set[str]) -> list[tuple[int, ...]]:
        """Groups of ranks that differ only on these axes."""
        groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank, coords in enumerate(self.faults.coords):
            key = tuple((axis, place) for axis, place in coords.items() if axis not in within)
            groups.setdefault(key, []).append(rank)
        return [tuple(g) for g in groups.values() if len(g) > 1]
