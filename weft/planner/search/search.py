"""Branch and bound over a space: the fastest layouts that fit, found exactly.

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
from weft.planner.memory.layouts_memory import GIB, memory_by_part
from weft.planner.model.facts import ClusterFacts, ModelFacts
from weft.planner.schedules.registry import SCHEDULE_NAMES
from weft.planner.search.candidates import RECOMPUTES, IntArray, Layouts
from weft.planner.search.frontier import BestLayouts, degrees
from weft.planner.search.space import Columns, Space, coarse, count, expand, layouts_of
from weft.planner.time.step import Estimates, estimate

CHUNK = 16_384
"""Candidates estimated at once: their arrays stay in the cache."""
FIRST_ROWS, ROWS_AT_ONCE = 16, 512
"""Coarse rows opened at first, and at once after that."""
THREADS = min(2, os.cpu_count() or 1)
BOUND_SLACK = 0.98
"""Bounds are lowered by this much, for rounding in the estimator's curves."""


@dataclass(frozen=True)
class Estimator:
    """Model, cluster, calibration and batch that layouts are estimated with."""

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
        held = memory_by_part(self.model, layouts, self.calibration)
        return np.asarray(sum(held.values()) / GIB * self.heavier)


@dataclass(frozen=True)
class SearchResult:
    """Layouts that fit, the best first."""

    space: Space
    estimator: Estimator
    layouts: Layouts
    times: NDArray[np.float64]
    peaks: NDArray[np.float64]
    size: int
    """Candidates in the space."""
    estimated: int
    """Candidates, and bounds of groups of them, that were estimated one by one."""
    smallest_gib: float
    """Memory of the layout that needs least, whether it fits or not."""
    smallest: Layouts
    """That layout."""
    seconds: float

    def __len__(self) -> int:
        return len(self.layouts)

    def outgrown(self, need_gib: float | None) -> float:
        """How much more the engine counts for the winner than the search did; 1 where it fits by both."""
        if need_gib is None or len(self) == 0 or need_gib <= self.estimator.limit_gib:
            return 1.0
        return need_gib / float(self.peaks[0])

    def taking(self, layouts: Layouts, seconds: float, gib: float) -> SearchResult:
        """The same with one layout as what was found."""
        return replace(self, layouts=layouts, times=np.array([seconds]), peaks=np.array([gib]))

    def best(self, number: int) -> IntArray:
        """Indices of the best layout of each of the first `number` different sets of degrees."""
        _, first = np.unique(degrees(self.layouts), return_index=True)
        return np.sort(first)[:number]


def find_layouts(space: Space, estimator: Estimator, top: int = 1, front: bool = False) -> SearchResult:
    """The best of each of the `top` best sets of degrees; with `front`, also all that none beats in time and memory.

    A front reaches to layouts that take twice the best time.
    """
    return LayoutSearch(space, estimator).find(top, front)


class LayoutSearch:
    """The coarse rows of a space with their bounds, computed once and searched under any conditions."""

    def __init__(self, space: Space, estimator: Estimator) -> None:
        start = time.perf_counter()
        self.space, self.estimator = space, estimator
        self.rows = coarse(space)
        self.size = count(space, self.rows)
        self.times, self.peaks = _row_bounds(space, estimator, self.rows)
        self.seconds = time.perf_counter() - start

    def find(self, top: int = 1, front: bool = False, fine: Space | None = None, **only: Any) -> SearchResult:
        """Search the rows whose settings are among `only` (such as tp=(1,)); `fine` narrows schedules and the like."""
        start = time.perf_counter() - self.seconds
        space, estimator, rows, times, peaks = fine or self.space, self.estimator, self.rows, self.times, self.peaks
        if only:
            mask = np.logical_and.reduce([np.isin(rows[name], values) for name, values in only.items()])
            rows = {key: array[mask] for key, array in rows.items()}
            times, peaks = times[mask], peaks[mask]
        size = self.size if not only and fine is None else count(space, rows)
        order = np.flatnonzero(peaks <= estimator.limit_gib)
        order = order[np.argsort(times[order], kind="stable")]
        kept = BestLayouts(top, front)
        at, opened, estimated = 0, FIRST_ROWS, len(peaks)
        with ThreadPoolExecutor(THREADS) as pool:  # numpy lets go of the interpreter while it works on an array
            while at < len(order) and times[order[at]] * BOUND_SLACK <= kept.horizon:
                batch = order[at : at + opened]
                batch = batch[kept.open(times[batch] * BOUND_SLACK, peaks[batch])]
                at, opened = at + opened, ROWS_AT_ONCE
                parts = [{key: array[some] for key, array in rows.items()} for some in _halves(batch)]
                for layouts, made in pool.map(lambda part: _estimate_rows(space, estimator, part, front), parts):
                    kept.add(layouts, made)
                    estimated += len(layouts)
        smallest, least = _smallest(space, estimator, rows, peaks)
        return SearchResult(
            space,
            estimator,
            *kept.result(layouts_of(space, _none(rows))),
            size,
            estimated,
            least,
            smallest,
            time.perf_counter() - start,
        )


def _halves(batch: IntArray) -> list[IntArray]:
    """A part for each core, where there is enough for all."""
    return [part for part in np.array_split(batch, THREADS if len(batch) > FIRST_ROWS else 1) if len(part)]


def _none(rows: Columns) -> Columns:
    return {**{key: array[:0] for key, array in rows.items()}}


def _row_bounds(space: Space, estimator: Estimator, rows: Columns) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds and GiB that no fine choice of a coarse row stays under."""
    layouts = layouts_of(space, rows)
    size = len(layouts)
    times, peaks = np.full(size, np.inf), np.full(size, np.inf)
    # fewer microbatches wait under naive than under 1f1b, and under no other schedule
    smallest = SCHEDULE_NAMES.index("naive" if any(name == "naive" for name, _ in space.schedules) else "1f1b")
    lone = SCHEDULE_NAMES.index("1f1b")

    def work(a: int) -> None:
        part = layouts.take(slice(a, a + CHUNK))
        small = replace(estimator, model=_smallest_stage_model(estimator.model, part))
        code = np.full(len(part), RECOMPUTES.index(space.recompute[-1]))
        peaks[a : a + CHUNK] = small.peak_gib(replace(part, schedule=np.full(len(part), smallest), recompute=code))
        fit = np.flatnonzero(peaks[a : a + CHUNK] <= estimator.limit_gib)
        if len(fit) == 0:
            return
        part = part.take(fit)
        small = replace(estimator, model=_smallest_stage_model(estimator.model, part))
        code = np.full(len(part), RECOMPUTES.index(space.recompute[0]))
        fast = replace(part, schedule=np.full(len(part), lone), recompute=code)
        best = _without_pipeline(small.estimate(fast))
        for other in space.placement[1:]:
            moved = replace(fast, placement=np.where(part.pp > 1, other, 0))
            best = np.minimum(best, _without_pipeline(small.estimate(moved)))
        times[a + fit] = best

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(0, size, CHUNK)))
    return times, peaks


def _smallest_stage_model(model: ModelFacts, layouts: Layouts) -> ModelFacts:
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


def _estimate_rows(space: Space, estimator: Estimator, rows: Columns, front: bool) -> tuple[Layouts, list[Estimates]]:
    """Every fine choice of coarse rows that is worth it, estimated."""
    layouts = _fine_choices(space, estimator, rows, front)
    return layouts, [estimator.estimate(layouts.take(slice(a, a + CHUNK))) for a in range(0, len(layouts), CHUNK)]


def _fine_choices(space: Space, estimator: Estimator, rows: Columns, front: bool) -> Layouts:
    """Every fine choice of coarse rows that fits; without `front` only the least recompute that fits."""
    layouts = layouts_of(space, expand(space, rows))
    fits = estimator.peak_gib(layouts) <= estimator.limit_gib
    kinds = len(space.recompute)
    if kinds == 1:
        return layouts.take(fits)
    each = len(layouts) // kinds  # recompute is spread last: the same row stands once in each of `kinds` parts
    table = fits.reshape(kinds, each)
    extra = _some_blocks(space, estimator, layouts, table)
    if not front:
        first = np.zeros_like(table)
        first[np.argmax(table, axis=0), np.arange(each)] = True
        fits = (table & first).ravel()
    return Layouts.join([layouts.take(fits), extra])


def _some_blocks(space: Space, estimator: Estimator, layouts: Layouts, table: NDArray[np.bool_]) -> Layouts:
    """Where all activations do not fit and recomputing all blocks does: recompute only as many as it needs."""
    kinds, each = table.shape
    if not space.by_block or space.recompute[-1] != "full" or space.recompute[0] == "full":
        return layouts.take(slice(0, 0))
    rows = np.flatnonzero(table[-1] & ~table[0])
    base = layouts.take((kinds - 1) * each + rows)
    if len(base) == 0:
        return base
    none = estimator.peak_gib(replace(base, recompute_blocks=np.zeros(len(base), np.int64)))
    blocks = np.ceil(estimator.model.layers / (base.pp * base.virtual_stages)).astype(np.int64)
    all_ = estimator.peak_gib(replace(base, recompute_blocks=blocks))
    share = (none - estimator.limit_gib) / np.maximum(none - all_, 1e-12)
    needed = np.ceil(np.clip(share, 0, 1) * blocks - 1e-9).astype(np.int64)
    tried = replace(base, recompute_blocks=needed)
    useful = (needed > 0) & (needed < blocks) & (estimator.peak_gib(tried) <= estimator.limit_gib)
    return tried.take(useful)


def _smallest(
    space: Space, estimator: Estimator, rows: Columns, peaks: NDArray[np.float64], look: int = 64
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
        real = estimator.peak_gib(layouts)
        at = int(np.argmin(real))
        if real[at] < least:
            best, least = layouts.take([at]), float(real[at])
    return best, least
