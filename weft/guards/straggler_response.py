"""Slow ranks and slow links of a run: how they are told from the others, and what is done about them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

from weft.data.batch_shares import BatchShares
from weft.data.loader import Loader
from weft.guards.notes import Notes
from weft.guards.slow_links import Links
from weft.guards.step_report import Row
from weft.guards.straggler_detection import Pace, Slow
from weft.guards.work_shares import PATIENCE_S, Balance
from weft.job.schema import Job
from weft.mesh import UNDER, Mesh
from weft.planner.plan import Plan

PAUSE = 0.9
"""What is left after each step without a slow rank of the time that one has lost."""
SUPERVISED = "WEFT_SLOT"
"""In the environment of a process that a supervisor can replace."""


class Tempo:
    """What each rank computes and waits for, step by step, and the shares of a step's samples that follow from it."""

    def __init__(self, job: Job, plan: Plan, mesh: Mesh, notes: Notes, fixed: Callable[[], bool]):
        """fixed: shares must stay equal. Those of replicas that train alone always do: their batches are their own."""
        self.settings, self.plan, self.mesh, self.notes = job.resilience, plan, mesh, notes
        self._fixed = fixed
        self.links_of = {axis: self._groups(set(UNDER.get(axis, (axis,)))) for axis in mesh.axes}
        self.shares = BatchShares.even(job.train.global_batch, plan.microbatch, plan.dp)
        self.balance = Balance(plan, job.train.global_batch)
        self.pace, self.links = Pace(mesh.world), Links()
        self.loader: Loader | None = None
        self.slow: int | None = None
        self.lost_s = 0.0
        self.seconds: list[float] = []

    def attach(self, loader: Loader) -> Loader:
        """Whom to tell about other shares."""
        self.loader = loader
        loader.shares = self.shares
        return loader

    def judge(self, step: int, now: int, rows: list[Row]) -> None:
        """Conclude from what the ranks told of a step; `now` is the last step that is done."""
        seconds = max(row.busy + row.data + sum(row.waited) for row in rows)  # every rank's own clock differs a little
        self.seconds = [*self.seconds[-63:], seconds]
        usual = statistics.median(self.seconds)
        shortest = {
            (axis, group): min(rows[r].waited[i] for r in group)
            for i, axis in enumerate(self.links_of)
            for group in self.links_of[axis]
        }
        for link in self.links.add(usual, shortest):
            where = "–".join(map(str, link.ranks))
            why = (
                f"messages on {link.axis} between ranks {where} take {1e3 * link.now_s:.0f} ms a step instead of "
                f"{1e3 * link.usual_s:.0f} ms: the link between them is slow"
            )
            self.notes.fault("slow_link", step, why, axis=link.axis, ranks=list(link.ranks))
        self.pace.add(seconds, *([getattr(row, name) for row in rows] for name in ("busy", "delay", "idle")))
        self._slow_rank(step, now)

    def _slow_rank(self, step: int, now: int) -> None:
        uneven = len(set(self.shares.counts)) > 1
        slow = None if uneven else self.pace.slow()  # who has more to do is not slow
        if not uneven and (slow is None or slow.rank != self.slow):  # what one rank loses with long pauses is nothing
            self.lost_s, self.balance.lost_s = PAUSE * self.lost_s, PAUSE * self.balance.lost_s
        if slow is not None and slow.rank != self.slow:
            self.slow = slow.rank
            why = f"rank {slow.rank} computes {slow.ratio:.1f} times as long as the others"
            self.notes.fault("slow_rank", step, why, slow.rank, ratio=round(slow.ratio, 3))
        if slow is not None and self.settings.evict_slow and SUPERVISED in os.environ:
            self._evict(slow)
        typical = self.pace.typical()
        if not typical or not (uneven or slow) or not self.settings.rebalance:
            return
        if self.plan.dp == 1 or self.plan.alone or self._fixed():
            return
        better = self.balance.better(self.shares, self._by_share(typical))
        if better is not None:
            self._reshare(now, better)

    def _evict(self, slow: Slow) -> None:
        """Once a second was lost, the slow rank leaves, and the supervisor puts another process in its place."""
        self.lost_s += slow.lost_s
        if self.lost_s > PATIENCE_S and slow.rank == self.mesh.rank:
            raise OSError(
                f"this rank computes {slow.ratio:.1f} times as long as the others: resilience.evict_slow is on"
            )

    def _by_share(self, busy: list[float]) -> list[float]:
        """How long each data-parallel rank computes: its slowest member."""
        out = [0.0] * self.plan.dp
        for coords, seconds in zip(self.notes.coords, busy, strict=True):
            at = coords.get("dp_replicate", 0) * self.plan.dp_shard + coords.get("dp_shard", 0)
            out[at] = max(out[at], seconds)
        return out

    def _reshare(self, now: int, shares: BatchShares) -> None:
        before, self.shares = self.shares.counts, shares
        self.pace.forget()
        self.slow = None
        if self.loader is not None:
            self.loader.shares = shares
        self.notes.recovered("slow_rank", "rebalance", now + 1, was=list(before), shares=list(shares.counts))
        self.notes.warn(
            f"sequences of a step are shared anew among the ranks, {list(shares.counts)} after {list(before)}"
        )

    def _groups(self, within: set[str]) -> list[tuple[int, ...]]:
        """The ranks that differ only on these axes."""
        groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank, coords in enumerate(self.notes.coords):
            key = tuple((axis, place) for axis, place in coords.items() if axis not in within)
            groups.setdefault(key, []).append(rank)
        return [tuple(g) for g in groups.values() if len(g) > 1]
