"""The best layouts found so far: the best of each set of degrees, and the Pareto front."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.planner.search.candidates import IntArray, Layouts

TIME_TOLERANCE = 0.015
"""Relative difference below which step times count as equal, as no estimate is that exact: of such layouts the simplest
is chosen."""


def degrees(layouts: Layouts) -> IntArray:
    key = np.zeros(len(layouts), np.int64)
    for axis in (layouts.pp, layouts.tp, layouts.cp, layouts.dp_shard, layouts.ep):
        key = key * 65_537 + axis  # degrees are far smaller; wrapping keeps keys apart well enough for a list of a few
    return key


def complexity(layouts: Layouts) -> NDArray[np.float64]:
    """Complexity of a layout; of equally fast ones the least complex is chosen."""
    several = [
        3 * (layouts.pp > 1), 2 * (layouts.tp > 1), 2 * (layouts.cp > 1), layouts.ep > 1, layouts.dp_shard > 1,
        (layouts.dp_replicate > 1) & (layouts.dp_shard > 1), 0.1 * layouts.zero, 0.5 * (layouts.schedule > 0),
        0.5 * layouts.recompute, 0.2 * (layouts.recompute_blocks >= 0), layouts.offload > 0, layouts.compression > 0,
    ]  # fmt: skip
    return np.asarray(sum(np.asarray(part, float) for part in several))


def ranked(layouts: Layouts, times: NDArray[np.float64], peaks: NDArray[np.float64], beside: float | None) -> IntArray:
    """Order of layouts, the best first: by time in steps of TIME_TOLERANCE from the fastest, or from a time that they
    stand beside, then complexity, time and memory."""
    steps = np.floor(np.log(times / (beside or times.min())) / TIME_TOLERANCE)
    return np.lexsort((peaks, times, complexity(layouts), steps)).astype(np.int64)


class BestLayouts:
    """The best layouts so far, and the bounds beyond which nothing better can follow."""

    def __init__(self, top: int, front: bool) -> None:
        self.top, self.front = top, front
        self.bound = np.inf
        """Times above this are not among the best."""
        self.parts: list[Layouts] = []
        self.times, self.peaks = np.array([]), np.array([])
        self.keys = np.array([], np.int64)
        self.horizon = np.inf
        """Bounds above this are not opened."""
        self.stairs = (np.array([]), np.array([]))
        """The front so far: times rising, memory falling."""

    def open(self, times: NDArray[np.float64], peaks: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which bounds may still lead to one of the best layouts or to a point of the front."""
        wanted = times <= self.bound
        if self.front and len(self.stairs[0]):
            at = np.searchsorted(self.stairs[0], times, side="right") - 1
            beaten = (at >= 0) & (self.stairs[1][np.maximum(at, 0)] <= peaks)
            wanted |= (times <= self.horizon) & ~beaten
        return wanted

    def add(self, layouts: Layouts, times: NDArray[np.float64], peaks: NDArray[np.float64]) -> None:
        """Add layouts that fit, and drop those that are neither among the best nor on the front."""
        if len(layouts) == 0:
            return
        self.parts.append(layouts)
        self.times = np.concatenate([self.times, times])
        self.peaks = np.concatenate([self.peaks, peaks])
        self.keys = np.concatenate([self.keys, degrees(self.parts[-1])])
        order = np.argsort(self.times, kind="stable")
        _, first = np.unique(self.keys[order], return_index=True)
        best = np.sort(self.times[order][first])
        self.bound = best[self.top - 1] * (1 + 2 * TIME_TOLERANCE) if len(best) >= self.top else np.inf
        self.horizon = max(self.bound, 2 * best[0]) if self.front else self.bound
        keep = self.times <= self.bound
        if self.front:
            low = np.minimum.accumulate(self.peaks[order])
            step = np.concatenate([[True], low[1:] < low[:-1]])
            self.stairs = (self.times[order][step], low[step])
            keep[order[step]] = True
        self.parts = [Layouts.join(self.parts).take(keep)]
        self.times, self.peaks, self.keys = self.times[keep], self.peaks[keep], self.keys[keep]

    def result(
        self, none: Layouts, beside: float | None = None
    ) -> tuple[Layouts, NDArray[np.float64], NDArray[np.float64]]:
        """Layouts, times and peaks, the best first as `ranked` has it; `none` where nothing was kept."""
        if len(self.times) == 0:
            return none, self.times, self.peaks
        layouts = Layouts.join(self.parts)
        order = ranked(layouts, self.times, self.peaks, beside)
        return layouts.take(order), self.times[order], self.peaks[order]
