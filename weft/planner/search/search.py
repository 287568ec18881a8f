"""The search: the fastest layouts of a space that fit, found exactly, by bounds instead of by looking at all.

Settings fall in two: coarse ones (degrees, ZeRO stage, microbatch) and fine ones (schedule, placement, recompute). For
each coarse row the estimator itself gives a bound: no bubble, no messages between stages, no embedding and head beside
a stage's blocks and nothing recomputed is never slower than any fine choice; as few waiting microbatches as a schedule
allows and everything recomputed never needs more memory. Rows are opened from the lowest bound up, until the bound is
above what was found.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.calibration import Calibration
from weft.planner.memory.layouts_memory import GIB, hold
from weft.planner.model.facts import ClusterFacts, ModelFacts
from weft.planner.schedules.registry import SCHEDULE_NAMES
from weft.planner.search.candidates import RECOMPUTES, Ints, Layouts
from weft.planner.search.frontier import Kept, degrees
from weft.planner.search.space import Rows, Space, coarse, count, expand, layouts_of
from weft.planner.time.step import Estimates, estimate

CHUNK = 16_384
"""Candidates estimated at once: their arrays stay in the cache."""
FIRST, OPENED = 16, 512
"""Coarse rows opened at first, and at once after that."""
CORES = min(2, os.cpu_count() or 1)
SLACK = 0.98
"""Bounds are lowered by this much, for rounding in the estimator's curves."""


@dataclass(frozen=True)
class Scene:
    """What stays the same over a search."""

    model: ModelFacts
    cluster: ClusterFacts
    calibration: Calibration
    batch: int
    heavier: float = 1.0
    """What the engine's own count of memory says over this model's, where a layout was found to need more."""

    @property
    def limit_gib(self) -> float:
        return float(self.cluster.memory_gib * self.calibration.usable)

    def estimate(self, layouts: Layouts) -> Estimates:
        made = estimate(self.model, self.cluster, layouts, self.calibration, self.batch)
        if self.heavier == 1:
            return made
        peak = made.peak_gib * self.heavier
        memory = {part: gib * self.heavier for part, gib in made.memory.items()}
        return replace(made, memory=memory, peak_gib=peak, fits=peak <= self.limit_gib)

    def peak_gib(self, layouts: Layouts) -> NDArray[np.float64]:
        held = hold(self.model, layouts, self.calibration)
        return np.asarray(sum(held.values()) / GIB * self.heavier)


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

    def outgrown(self, need_gib: float | None) -> float:
        """How much more the engine counts for the winner than the search did; 1 where it fits by both."""
        if need_gib is None or len(self) == 0 or need_gib <= self.scene.limit_gib:
            return 1.0
        return need_gib / float(self.peaks[0])

    def taking(self, layouts: Layouts, seconds: float, gib: float) -> Found:
        """The same with one layout as what was found."""
        return replace(self, layouts=layouts, times=np.array([seconds]), peaks=np.array([gib]))

    def best(self, number: int) -> Ints:
        """Indices of the best layout of each of the first `number` different sets of degrees."""
        _, first = np.unique(degrees(self.layouts), return_index=True)
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
        kept = Kept(top, front)
        at, opened, estimated = 0, FIRST, len(peaks)
        with ThreadPoolExecutor(CORES) as pool:  # numpy lets go of the interpreter while it works on an array
            while at < len(order) and times[order[at]] * SLACK <= kept.horizon:
                batch = order[at : at + opened]
                batch = batch[kept.open(times[batch] * SLACK, peaks[batch])]
                at, opened = at + opened, OPENED
                parts = [{key: array[some] for key, array in rows.items()} for some in _halves(batch)]
                for layouts, made in pool.map(lambda part: _open(space, scene, part, front), parts):
                    kept.add(layouts, made)
                    estimated += len(layouts)
        frugal, least = _most_frugal(space, scene, rows, peaks)
        return Found(
            space,
            scene,
            *kept.result(layouts_of(space, _none(rows))),
            size,
            estimated,
            least,
            frugal,
            time.perf_counter() - start,
        )


def _halves(batch: Ints) -> list[Ints]:
    """A part for each core, where there is enough for all."""
    return [part for part in np.array_split(batch, CORES if len(batch) > FIRST else 1) if len(part)]


def _none(rows: Rows) -> Rows:
    return {**{key: array[:0] for key, array in rows.items()}}


def _bounds(space: Space, scene: Scene, rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds and GiB that no fine choice of a coarse row stays under."""
    layouts = layouts_of(space, rows)
    size = len(layouts)
    times, peaks = np.full(size, np.inf), np.full(size, np.inf)
    # fewer microbatches wait under naive than under 1f1b, and under no other schedule
    frugal = SCHEDULE_NAMES.index("naive" if any(name == "naive" for name, _ in space.schedules) else "1f1b")
    lone = SCHEDULE_NAMES.index("1f1b")

    def work(a: int) -> None:
        part = layouts.take(slice(a, a + CHUNK))
        small = replace(scene, model=_least(scene.model, part))
        code = np.full(len(part), RECOMPUTES.index(space.recompute[-1]))
        peaks[a : a + CHUNK] = small.peak_gib(replace(part, schedule=np.full(len(part), frugal), recompute=code))
        fit = np.flatnonzero(peaks[a : a + CHUNK] <= scene.limit_gib)
        if len(fit) == 0:
            return
        part = part.take(fit)
        small = replace(scene, model=_least(scene.model, part))
        code = np.full(len(part), RECOMPUTES.index(space.recompute[0]))
        fast = replace(part, schedule=np.full(len(part), lone), recompute=code)
        best = _without_pipeline(small.estimate(fast))
        for other in space.placement[1:]:
            moved = replace(fast, placement=np.where(part.pp > 1, other, 0))
            best = np.minimum(best, _without_pipeline(small.estimate(moved)))
        times[a + fit] = best

    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(work, range(0, size, CHUNK)))
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


def _open(space: Space, scene: Scene, rows: Rows, front: bool) -> tuple[Layouts, list[Estimates]]:
    """Every fine choice of coarse rows that is worth it, estimated."""
    layouts = _fine(space, scene, rows, front)
    return layouts, [scene.estimate(layouts.take(slice(a, a + CHUNK))) for a in range(0, len(layouts), CHUNK)]


def _fine(space: Space, scene: Scene, rows: Rows, front: bool) -> Layouts:
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
        if len(layouts) == 0:  # no schedule makes so many stages
            continue
        real = scene.peak_gib(layouts)
        at = int(np.argmin(real))
        if real[at] < least:
            best, least = layouts.take([at]), float(real[at])
    return best, least
