"""The search: the fastest layouts of a space that fit, found exactly, by bounds instead of by looking at all.

Settings fall in two: coarse ones (degrees, ZeRO stage, microbatch) and fine ones (schedule, placement, recompute). For
each coarse row the estimator itself gives a bound: no bubble, no messages between stages, no embedding and head beside
a stage's blocks and nothing recomputed is never slower than any fine choice; one waiting microbatch and everything
recomputed never needs more memory. Rows are opened from the lowest bound up, until the bound is above what was found.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.plan.calibration import Calibration
from weft.plan.cost import Estimates, estimate
from weft.plan.facts import ClusterFacts, ModelFacts
from weft.plan.hold import GIB, hold
from weft.plan.layouts import RECOMPUTES, SCHEDULE_NAMES, Ints, Layouts
from weft.plan.space import Rows, Space, coarse, count, expand, layouts_of

CHUNK = 16_384
"""Candidates estimated at once: their arrays stay in the cache."""
FIRST, OPENED = 16, 256
"""Coarse rows opened at first, and at once after that."""
SLACK = 0.98
"""Bounds are lowered by this much, for rounding in the estimator's curves."""
NEAR = 0.005
"""Layouts whose times differ by less than this are as good as equal: the simplest of them is taken."""
KEPT = 20_000
"""Estimated layouts that are kept for the front and the runner-ups."""


@dataclass(frozen=True)
class Scene:
    """What stays the same over a search."""

    model: ModelFacts
    cluster: ClusterFacts
    calibration: Calibration
    batch: int

    @property
    def limit_gib(self) -> float:
        return float(self.cluster.memory_gib * self.calibration.usable)

    def estimate(self, layouts: Layouts) -> Estimates:
        return estimate(self.model, self.cluster, layouts, self.calibration, self.batch)

    def peak_gib(self, layouts: Layouts) -> NDArray[np.float64]:
        held = hold(self.model, layouts, self.calibration)
        return np.asarray(sum(held.values()) / GIB)


@dataclass(frozen=True)
class Found:
    """What a search found: layouts that fit, the best first."""

    space: Space
    scene: Scene
    layouts: Layouts
    times: NDArray[np.float64]
    peaks: NDArray[np.float64]
    size: int
    """Candidates in the space."""
    estimated: int
    """Candidates, and bounds of groups of them, that were estimated one by one."""
    least_gib: float
    """Memory of the most frugal layout, whether it fits or not."""
    frugal: Layouts
    """That layout."""
    seconds: float

    def __len__(self) -> int:
        return len(self.layouts)

    def best(self, number: int) -> Ints:
        """Indices of the best layout of each of the first `number` different sets of degrees."""
        _, first = np.unique(_degrees(self.layouts), return_index=True)
        return np.sort(first)[:number]


def search(space: Space, scene: Scene, top: int = 1, front: bool = False) -> Found:
    """The best of each of the `top` best sets of degrees; with `front`, also all that none beats in time and memory.

    A front reaches to layouts that take twice the best time.
    """
    return Bounds(space, scene).find(top, front)


class Bounds:
    """The coarse rows of a space and their bounds, worked out once and searched under any number of conditions."""

    def __init__(self, space: Space, scene: Scene) -> None:
        start = time.perf_counter()
        self.space, self.scene = space, scene
        self.rows = coarse(space)
        self.size = count(space, self.rows)
        self.times, self.peaks = _bounds(space, scene, self.rows)
        self.seconds = time.perf_counter() - start

    def find(self, top: int = 1, front: bool = False, fine: Space | None = None, **only: Any) -> Found:
        """Search the rows whose settings are among `only` (such as tp=(1,)); `fine` narrows schedules and the like."""
        start = time.perf_counter() - self.seconds
        space, scene, rows, times, peaks = fine or self.space, self.scene, self.rows, self.times, self.peaks
        if only:
            mask = np.logical_and.reduce([np.isin(rows[name], values) for name, values in only.items()])
            rows = {key: array[mask] for key, array in rows.items()}
            times, peaks = times[mask], peaks[mask]
        size = self.size if not only and fine is None else count(space, rows)
        order = np.flatnonzero(peaks <= scene.limit_gib)
        order = order[np.argsort(times[order], kind="stable")]
        kept = _Kept(top, front)
        at, opened, estimated = 0, OPENED if front else FIRST, len(peaks)
        while at < len(order) and times[order[at]] * SLACK <= kept.horizon:
            batch = order[at : at + opened]
            batch = batch[kept.open(times[batch] * SLACK, peaks[batch])]
            at, opened = at + opened, OPENED
            if len(batch):
                found = _open(space, scene, {key: array[batch] for key, array in rows.items()}, front)
                estimated += kept.add(scene, found)
        frugal, least = _most_frugal(space, scene, rows, peaks)
        return Found(
            space, scene, *kept.result(space, rows), size, estimated, least, frugal, time.perf_counter() - start
        )


def _none(rows: Rows) -> Rows:
    return {**{key: array[:0] for key, array in rows.items()}}


def _bounds(space: Space, scene: Scene, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds and GiB that no fine choice of a coarse row stays under."""
    layouts = layouts_of(space, rows)
    size = len(layouts)
    times, peaks = np.full(size, np.inf), np.full(size, np.inf)
    frugal, lone = SCHEDULE_NAMES.index("naive"), SCHEDULE_NAMES.index("1f1b")
    for a in range(0, size, CHUNK):
        part = layouts.take(slice(a, a + CHUNK))
        small = replace(scene, model=_least(scene.model, part))
        code = np.full(len(part), RECOMPUTES.index(space.recompute[-1]))
        low = replace(part, schedule=np.full(len(part), frugal), recompute=code)
        peaks[a : a + CHUNK] = small.peak_gib(low)
        fit = np.flatnonzero(peaks[a : a + CHUNK] <= scene.limit_gib)
        if len(fit) == 0:
            continue
        part = part.take(fit)
        small = replace(scene, model=_least(scene.model, part))
        code = np.full(len(part), RECOMPUTES.index(space.recompute[0]))
        fast = replace(part, schedule=np.full(len(part), lone), recompute=code)
        times[a + fit] = _without_pipeline(small.estimate(fast))
        for other in space.placement[1:]:
            moved = replace(fast, placement=np.where(part.pp > 1, other, 0))
            times[a + fit] = np.minimum(times[a + fit], _without_pipeline(small.estimate(moved)))
    return times, peaks


def _least(model: ModelFacts, layouts: Layouts) -> ModelFacts:
    """The model that every stage of a pipeline has at least: blocks that divide evenly, and no ends."""
    even = np.maximum(np.floor(model.layers / layouts.pp), 1) * layouts.pp
    ends = {
        name: np.where(layouts.pp > 1, 0, getattr(model, name)) for name in ("vocab", "embedding_rows", "positions")
    }
    return replace(model, layers=np.minimum(even, model.layers), **ends)


def _without_pipeline(made: Estimates) -> NDArray[np.float64]:
    waiting = made.time.get("waiting", 0.0)
    share = made.step_time_s / np.maximum(made.step_time_s - waiting, 1e-30)
    other_cp = made.time.get("cp", 0.0)  # the other style of cp may expose nothing of it
    saved = made.time["pp_bubble"] + made.time["pp_send"] + other_cp
    return np.asarray(made.step_time_s - saved * share)


def _open(space: Space, scene: Scene, rows: Rows, front: bool) -> Layouts:
    """Every fine choice of coarse rows that fits; without `front` only the least recompute that fits."""
    layouts = layouts_of(space, expand(space, rows))
    fits = scene.peak_gib(layouts) <= scene.limit_gib
    kinds = len(space.recompute)
    if kinds == 1:
        return layouts.take(fits)
    each = len(layouts) // kinds  # recompute is spread last: the same row stands once in each of `kinds` parts
    table = fits.reshape(kinds, each)
    extra = _some_blocks(space, scene, layouts, table)
    if not front:
        first = np.zeros_like(table)
        first[np.argmax(table, axis=0), np.arange(each)] = True
        fits = (table & first).ravel()
    return Layouts.join([layouts.take(fits), extra])


def _some_blocks(space: Space, scene: Scene, layouts: Layouts, table: NDArray[np.bool_]) -> Layouts:
    """Where all activations do not fit and recomputing all blocks does: recompute only as many as it needs."""
    kinds, each = table.shape
    if not space.by_block or space.recompute[-1] != "full" or space.recompute[0] == "full":
        return layouts.take(slice(0, 0))
    rows = np.flatnonzero(table[-1] & ~table[0])
    base = layouts.take((kinds - 1) * each + rows)
    if len(base) == 0:
        return base
    none = scene.peak_gib(replace(base, recompute_blocks=np.zeros(len(base), np.int64)))
    blocks = np.ceil(scene.model.layers / (base.pp * base.virtual_stages)).astype(np.int64)
    all_ = scene.peak_gib(replace(base, recompute_blocks=blocks))
    share = (none - scene.limit_gib) / np.maximum(none - all_, 1e-12)
    needed = np.ceil(np.clip(share, 0, 1) * blocks - 1e-9).astype(np.int64)
    tried = replace(base, recompute_blocks=needed)
    useful = (needed > 0) & (needed < blocks) & (scene.peak_gib(tried) <= scene.limit_gib)
    return tried.take(useful)


def _degrees(layouts: Layouts) -> Ints:
    key = np.zeros(len(layouts), np.int64)
    for axis in (layouts.pp, layouts.tp, layouts.cp, layouts.dp_shard, layouts.ep):
        key = key * 65_537 + axis  # degrees are far smaller; wrapping keeps keys apart well enough for a list of a few
    return key


def plainness(layouts: Layouts) -> NDArray[np.float64]:
    """How many things a layout needs to work; of equally fast ones the plainest is taken."""
    several = [
        3 * (layouts.pp > 1), 2 * (layouts.tp > 1), 2 * (layouts.cp > 1), layouts.ep > 1, layouts.dp_shard > 1,
        (layouts.dp_replicate > 1) & (layouts.dp_shard > 1), 0.1 * layouts.zero, 0.5 * (layouts.schedule > 0),
        0.05 * layouts.virtual_stages, 0.5 * layouts.placement, 0.5 * layouts.recompute,
        0.2 * (layouts.recompute_blocks >= 0), layouts.offload > 0, layouts.compression > 0,
    ]  # fmt: skip
    return np.asarray(sum(np.asarray(part, float) for part in several))


def ranked(layouts: Layouts, times: NDArray[np.float64], peaks: NDArray[np.float64]) -> Ints:
    """The best first: by time in steps of NEAR, then the plainer, then the faster, then what needs less memory."""
    steps = np.floor(np.log(times / times.min()) / NEAR)
    return np.lexsort((peaks, times, plainness(layouts), steps)).astype(np.int64)


class _Kept:
    """What has been found so far, and what is not worth opening any more."""

    def __init__(self, top: int, front: bool) -> None:
        self.top, self.front = top, front
        self.parts: list[Layouts] = []
        self.times, self.peaks = np.array([]), np.array([])
        self.keys = np.array([], np.int64)
        self.horizon = np.inf
        """Bounds above this are not opened."""
        self.stairs = (np.array([]), np.array([]))
        """The front so far: times rising, memory falling."""

    def open(self, times: NDArray[np.float64], peaks: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which bounds may still give something: a place among the best, or a step of the front."""
        wanted = times <= self.bound
        if self.front and len(self.stairs[0]):
            at = np.searchsorted(self.stairs[0], times, side="right") - 1
            beaten = (at >= 0) & (self.stairs[1][np.maximum(at, 0)] <= peaks)
            wanted |= (times <= self.horizon) & ~beaten
        return wanted

    bound = np.inf

    def add(self, scene: Scene, layouts: Layouts) -> int:
        for a in range(0, len(layouts), CHUNK):
            part = layouts.take(slice(a, a + CHUNK))
            made = scene.estimate(part)
            good = np.asarray(made.fits, bool)
            self.parts.append(part.take(good))
            self.times = np.concatenate([self.times, np.asarray(made.step_time_s)[good]])
            self.peaks = np.concatenate([self.peaks, np.asarray(made.peak_gib)[good]])
            self.keys = np.concatenate([self.keys, _degrees(self.parts[-1])])
        self._tidy()
        return len(layouts)

    def _tidy(self) -> None:
        if len(self.times) == 0:
            return
        order = np.argsort(self.times, kind="stable")
        _, first = np.unique(self.keys[order], return_index=True)
        best = np.sort(self.times[order][first])
        near = 1 + 2 * NEAR
        self.bound = best[self.top - 1] * near if len(best) >= self.top else np.inf
        self.horizon = max(self.bound, 2 * best[0]) if self.front else self.bound
        if self.front:
            low = np.minimum.accumulate(self.peaks[order])
            step = np.concatenate([[True], low[1:] < low[:-1]])
            self.stairs = (self.times[order][step], low[step])
        if len(self.times) > 4 * KEPT:
            keep = np.zeros(len(self.times), bool)
            keep[order[:KEPT]] = True
            keep[order[first]] = True
            if self.front:
                keep[order[step]] = True
            self.parts = [Layouts.join(self.parts).take(keep)]
            self.times, self.peaks, self.keys = self.times[keep], self.peaks[keep], self.keys[keep]

    def result(self, space: Space, rows: Rows) -> tuple[Layouts, NDArray[np.float64], NDArray[np.float64]]:
        if len(self.times) == 0:
            return layouts_of(space, _none(rows)), self.times, self.peaks
        layouts = Layouts.join(self.parts)
        order = ranked(layouts, self.times, self.peaks)
        return layouts.take(order), self.times[order], self.peaks[order]


def _most_frugal(
    space: Space, scene: Scene, rows: Rows, peaks: NDArray[np.float64], look: int = 64
) -> tuple[Layouts, float]:
    """The layout that needs least memory, and how much: among the rows of the lowest bounds."""
    if len(peaks) == 0:
        return layouts_of(space, _none(rows)), float("inf")
    order = np.argsort(peaks, kind="stable")
    best, least = layouts_of(space, _none(rows)), float("inf")
    for a in range(0, len(order), look):
        lowest = order[a : a + look]
        if peaks[lowest[0]] >= least:
            break
        layouts = layouts_of(space, expand(space, {key: array[lowest] for key, array in rows.items()}))
        real = scene.peak_gib(layouts)
        at = int(np.argmin(real))
        if real[at] < least:
            best, least = layouts.take([at]), float(real[at])
    return best, least
