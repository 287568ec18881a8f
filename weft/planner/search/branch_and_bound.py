"""Branch and bound over a space: the fastest layouts that fit, found exactly.

Settings are coarse (degrees, ZeRO stage, microbatch) or fine (schedule, style of cp, recompute). For
each coarse row the estimator itself gives a bound: no bubble, no messages between stages, no embedding and head on
a stage's blocks and nothing recomputed is never slower than any fine choice; as few waiting microbatches as a schedule
allows and everything recomputed never needs more memory. Rows are opened from the lowest bound up, until the bound is
above what was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.estimator import Estimator
from weft.planner.memory.layout_ranks import SPLITS
from weft.planner.model.model_facts import ModelFacts
from weft.planner.schedules.known_schedules import SCHEDULE_NAMES
from weft.planner.search.candidates import RECOMPUTES, IntArray, Layouts
from weft.planner.search.frontier import BestLayouts, degrees
from weft.planner.search.space import Columns, Space, coarse, count, expand, layouts_of
from weft.planner.time.step import Estimates

CHUNK = 32_768
"""Candidates estimated at once: their arrays stay in the cache."""
FIRST_LAYOUTS, LAYOUTS_AT_ONCE = 1024, 65_536
"""Layouts whose memory is computed at first, and at most at once after that."""
FIRST_ROWS, ROWS_AT_ONCE = 64, 2048
"""Coarse rows opened at first, and at once after that."""
BOUND_SLACK = 0.98
"""Bounds are lowered by this much, for rounding in the estimator's curves."""


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
    rows: Columns
    """The coarse rows that were searched."""
    bounds: NDArray[np.float64]
    """GiB that no layout of each row stays under."""

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def smallest(self) -> Layouts:
        """The layout that needs least memory where none fits, else the best."""
        return self._smallest[0]

    @property
    def smallest_gib(self) -> float:
        """The memory of that layout."""
        return self._smallest[1]

    @cached_property
    def _smallest(self) -> tuple[Layouts, float]:
        if len(self):
            return self.layouts.take([0]), float(self.peaks[0])
        return _smallest(self.space, self.estimator, self.rows, self.bounds)

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
        self.space, self.estimator = space, estimator
        self.rows = coarse(space)
        self.size = count(space, self.rows)
        number = len(next(iter(self.rows.values())))
        # rows that are opened at once need no bounds
        few = number <= FIRST_ROWS
        self.times, self.peaks = (
            (np.zeros(number), np.zeros(number)) if few else _row_bounds(space, estimator, self.rows)
        )

    def find(
        self, top: int = 1, front: bool = False, fine: Space | None = None, beside: float | None = None, **only: Any
    ) -> SearchResult:
        """Search the rows whose settings are among `only` (such as tp=(1,)); `fine` narrows schedules and the like,
        `beside` is the best time of the search whose order is used."""
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
        while at < len(order) and times[order[at]] * BOUND_SLACK <= kept.horizon:
            batch = order[at : at + opened]
            batch = batch[kept.open(times[batch] * BOUND_SLACK, peaks[batch])]
            at, opened = at + opened, ROWS_AT_ONCE
            if len(batch):
                estimated += _open_rows(space, estimator, {key: array[batch] for key, array in rows.items()}, kept)
        found = kept.result(layouts_of(space, _none(rows)), beside)
        return SearchResult(space, estimator, *found, size, estimated, rows, peaks)


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

    for a in range(0, size, CHUNK):
        part = layouts.take(slice(a, a + CHUNK))
        code = np.full(len(part), RECOMPUTES.index(space.recompute[-1]))
        least = replace(part, schedule=np.full(len(part), smallest), recompute=code)
        peaks[a : a + CHUNK] = estimator.least_gib(least, _smallest_stage_model(estimator.model, part))
        fit = np.flatnonzero(peaks[a : a + CHUNK] <= estimator.limit_gib)
        if len(fit) == 0:
            continue
        part = part.take(fit)
        small = replace(estimator, model=_smallest_stage_model(estimator.model, part))
        code = np.full(len(part), RECOMPUTES.index(space.recompute[0]))
        fast = replace(part, schedule=np.full(len(part), lone), recompute=code)
        times[a + fit] = _without_pipeline(small.estimate_time(fast))

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


def _open_rows(space: Space, estimator: Estimator, rows: Columns, kept: BestLayouts) -> int:
    """Estimate every fine choice of coarse rows: all times, and the memory of those that are fast enough to be kept,
    the fastest first. Returns how many were estimated."""
    layouts = layouts_of(space, expand(space, rows))
    parts = [slice(a, a + CHUNK) for a in range(0, len(layouts), CHUNK)]
    times = np.concatenate([np.array([]), *(estimator.estimate_time(layouts.take(p)).step_time_s for p in parts)])
    times[_impossible(layouts)] = np.inf
    peaks = np.full(len(layouts), np.inf)
    _weigh(estimator, layouts, times, peaks, kept)
    if space.by_block and space.recompute[-1] == "full" and space.recompute[0] != "full":
        _some_blocks(space, estimator, layouts, times, peaks, kept)
    return len(layouts)


def _impossible(layouts: Layouts) -> NDArray[np.bool_]:
    """Selective recompute keeps outputs for one backward pass of a block, and a split one passes it twice."""
    selective = layouts.recompute == RECOMPUTES.index("selective")
    return np.asarray(selective & SPLITS[layouts.schedule] & (layouts.pp > 1))


def _weigh(
    estimator: Estimator, layouts: Layouts, times: NDArray[np.float64], peaks: NDArray[np.float64], kept: BestLayouts
) -> None:
    """Fill in the memory of layouts that are fast enough, and keep those that fit."""
    for some in _by_speed(times, kept):
        peaks[some] = estimator.peak_gib(layouts.take(some))
        fitting = some[peaks[some] <= estimator.limit_gib]
        kept.add(layouts.take(fitting), times[fitting], peaks[fitting])


def _by_speed(times: NDArray[np.float64], kept: BestLayouts) -> Iterator[IntArray]:
    """Indices of layouts that are fast enough to be kept, the fastest first, in growing parts."""
    order = np.argsort(times, kind="stable")
    at, size = 0, FIRST_LAYOUTS
    while at < len(order) and times[order[at]] <= kept.horizon:
        some = order[at : at + size]
        yield some[times[some] <= kept.horizon]
        at, size = at + size, min(4 * size, LAYOUTS_AT_ONCE)


def _some_blocks(
    space: Space, estimator: Estimator, layouts: Layouts, times: NDArray[np.float64], peaks: NDArray[np.float64],
    kept: BestLayouts,
) -> None:  # fmt: skip
    """Where all activations do not fit and recomputing all blocks does: recompute only as many as needed."""
    kinds, limit = len(space.recompute), estimator.limit_gib
    each = len(layouts) // kinds  # recompute is spread last: the same row is once in each of `kinds` parts
    table, speed = peaks.reshape(kinds, each), times.reshape(kinds, each)
    over = np.flatnonzero((speed[0] <= kept.horizon) & (table[:-1] > limit).all(axis=0) & np.isfinite(table[0]))
    for part in _by_speed(speed[0][over], kept):
        rows = over[part]
        full = (kinds - 1) * each + rows
        unknown = full[np.isinf(peaks[full])]
        if len(unknown):
            peaks[unknown] = estimator.peak_gib(layouts.take(unknown))
        # memory falls linearly with the recomputed blocks, and time rises
        least = (table[0, rows] - limit) / np.maximum(table[0, rows] - peaks[full], 1e-12)
        soonest = speed[0, rows] + np.clip(least, 0, 1) * (times[full] - speed[0, rows])
        full = full[(peaks[full] <= limit) & (soonest * BOUND_SLACK <= kept.horizon)]
        if len(full) == 0:
            continue
        base = layouts.take(full)
        layers = int(estimator.model.layers)
        blocks = -(-layers // base.pp)
        one = estimator.peak_gib(replace(base, recompute_blocks=base.pp))  # one of each stage
        share = (one - limit) / np.maximum(one - peaks[full], 1e-12)
        needed = 1 + np.ceil(np.clip(share, 0, 1) * (blocks - 1) - 1e-9).astype(np.int64)
        # memory falls fastest with the first of them: at least so many are needed
        none = peaks[full - (kinds - 1) * each]
        least = 1 + np.ceil((one - limit) / np.maximum(none - one, 1e-12) - 1e-9)
        fewer = np.clip(least, 1, needed).astype(np.int64)
        fits = estimator.peak_gib(replace(base, recompute_blocks=np.minimum(fewer * base.pp, layers))) <= limit
        needed = np.where(fits, fewer, needed)
        tried = replace(base, recompute_blocks=np.minimum(needed * base.pp, layers)).take(needed < blocks)
        if len(tried):
            _weigh(estimator, tried, np.asarray(estimator.estimate_time(tried).step_time_s), np.zeros(len(tried)), kept)


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
        real = np.where(_impossible(layouts), np.inf, estimator.peak_gib(layouts))
        at = int(np.argmin(real))
        if real[at] < least:
            best, least = layouts.take([at]), float(real[at])
    return best, least
