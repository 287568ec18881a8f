"""Robust Gauss–Newton least squares over a few named calibration values, each within its bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weft.extensions.published.row_arrays import gather_rows
from weft.extensions.published.rows import PublishedRun
from weft.planner.calibration import Calibration
from weft.planner.time.step import estimate

BOUNDS: dict[str, tuple[float, float]] = {
    "matmul": (0.3, 1.1), "wave": (0.005, 3.0), "depth": (1.0, 1500.0), "low_precision": (0.3, 1.0),
    "attention": (0.05, 0.95), "traffic": (0.3, 12.0), "host_us": (5.0, 3000.0), "step_ms": (0.3, 400.0),
    "experts": (0.2, 1.0), "link": (0.2, 0.95), "network": (0.05, 1.0), "latency": (0.2, 30.0),
    "overlap_tp": (0.001, 0.95), "overlap_dp": (0.001, 0.98), "overlap_cp": (0.001, 0.98), "overlap_pp": (0.001, 0.98),
    "overlap_ep": (0.001, 0.98), "optimizer": (0.5, 10.0),
    "host_blend": (1.0, 12.0), "head_whole": (0.2, 1.0), "host_backward": (0.5, 2.0),
    "odd": (0.005, 0.5), "host_moe_us": (2.0, 1500.0), "jitter": (0.0005, 0.06),
}  # fmt: skip
PRIOR_WIDTH = 2.0
"""Width of the prior around the starting values, in units of the bounded scale: values that the rows do not determine
stay there."""
RELATIVE_PRIOR_WIDTH = {"experts": 0.1, "host_moe_us": 0.4, "overlap_ep": 0.4}
"""Factor on the prior width of values that few rows determine."""
HUBER_WIDTH = 0.03
"""Errors beyond this count linearly, so that outliers do not dominate the fit."""


EDGE = 0.03
"""Where a fit begins at least, as a share of the bounded scale: at a bound itself it could not move."""


def _is_share(name: str) -> bool:
    """Whether the scale of a value is linear, as it may be 0; others are logarithmic."""
    return name.startswith("overlap_")


def to_free(value: float, name: str) -> float:
    low, high = BOUNDS[name]
    scale = (value - low) / (high - low) if _is_share(name) else np.log(max(value, 1e-9) / low) / np.log(high / low)
    share = np.clip(scale, EDGE, 1 - EDGE)
    return float(np.log(share / (1 - share)))


def from_free(free: float, name: str) -> float:
    low, high = BOUNDS[name]
    share = 1 / (1 + np.exp(-free))
    return float(low + (high - low) * share if _is_share(name) else low * (high / low) ** share)


def fit(
    rows: Sequence[PublishedRun], start: Calibration, names: Sequence[str], steps: int = 25, width: float = PRIOR_WIDTH
) -> Calibration:
    """The calibration near `start` under which the rows' predicted times are closest to the measured, in logarithms."""
    model, cluster, layouts = gather_rows(rows)
    measured = np.log([row.seconds or 1.0 for row in rows])

    def errors(free: np.ndarray) -> np.ndarray:
        cal = start.with_(**{n: from_free(f, n) for n, f in zip(names, free, strict=True)})
        return np.log(estimate(model, cluster, layouts, cal, memory={}).step_time_s) - measured

    begin = np.array([to_free(getattr(start, n), n) for n in names])
    free = _descend(errors, begin, steps, width * np.array([RELATIVE_PRIOR_WIDTH.get(n, 1.0) for n in names]))
    return start.with_(**{n: round(from_free(f, n), 4) for n, f in zip(names, free, strict=True)})


def _descend(
    errors: Callable[[np.ndarray], np.ndarray], begin: np.ndarray, steps: int, width: np.ndarray
) -> np.ndarray:
    def loss(e: np.ndarray, x: np.ndarray) -> float:
        return float(
            np.sum(2 * HUBER_WIDTH**2 * (np.sqrt(1 + (e / HUBER_WIDTH) ** 2) - 1))
            + HUBER_WIDTH**2 * np.sum(((x - begin) / width) ** 2)
        )

    free, damping = begin.copy(), 1e-2
    e = errors(free)
    best = loss(e, free)
    for _ in range(steps):
        slope = np.stack([(errors(free + 1e-4 * unit) - e) / 1e-4 for unit in np.eye(len(free))], axis=1)
        weight = 1 / np.sqrt(1 + (e / HUBER_WIDTH) ** 2)
        pull = HUBER_WIDTH**2 / width**2
        left = slope.T @ (weight[:, None] * slope) + np.diag(pull)
        right = slope.T @ (weight * e) + pull * (free - begin)
        improved = False
        for _ in range(6):
            trial = free - np.clip(np.linalg.solve(left + damping * np.diag(np.diag(left)), right), -1.5, 1.5)
            tried = errors(trial)
            value = loss(tried, trial)
            if value < best:
                improved = best - value > 1e-6 * best
                free, e, best, damping = trial, tried, value, damping / 4
                break
            damping *= 6
        if not improved:
            break
    return free


def profile(rows: Sequence[PublishedRun], cal: Calibration, rounds: int = 4) -> Calibration:
    """The same calibration with measured blocks: for every shape, the ratio that makes its rows' median error 0."""
    model, cluster, layouts = gather_rows(rows)
    measured = np.log([row.seconds or 1.0 for row in rows])
    shapes = [
        (float(m * s / c), float(d), float(t))
        for m, s, c, d, t in zip(layouts.microbatch, model.seq_len, layouts.cp, model.dim, layouts.tp, strict=True)
    ]
    ratio = dict.fromkeys(shapes, 0.0)
    for _ in range(rounds):
        tried = cal.with_(profile=tuple((*shape, round(float(np.exp(r)), 4)) for shape, r in ratio.items()))
        e = np.log(estimate(model, cluster, layouts, tried).step_time_s) - measured
        for shape in ratio:
            ratio[shape] -= float(np.median([x for x, s in zip(e, shapes, strict=True) if s == shape]))
    return tried
