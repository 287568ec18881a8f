"""Many rows as arrays: models, clusters and layouts of a table, so that one call estimates all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.extensions.published.rows import PublishedRun
from weft.planner.calibration import Calibration
from weft.planner.model.cluster_facts import ClusterFacts, Level
from weft.planner.model.model_facts import ModelFacts, Size, stack_models
from weft.planner.search.candidates import PRECISIONS, Layouts
from weft.planner.time.step import Estimates, estimate


def gather_rows(rows: Sequence[PublishedRun]) -> tuple[ModelFacts, ClusterFacts, Layouts]:
    """The arguments of `estimate`, with one entry per row."""
    names = sorted({name for row in rows for name in row.layout})
    layouts = Layouts.of(**{name: np.array([row.layout[name] for row in rows]) for name in names})
    clusters = [row.cluster for row in rows]
    levels = tuple(
        Level(
            first.name,
            *(np.array([getattr(c.levels[i], key) for c in clusters], float) for key in ("size", "gb_s", "latency_us")),
        )
        for i, first in enumerate(clusters[0].levels)
    )

    def each(name: str) -> Size:
        return np.array([getattr(c, name) for c in clusters], float)

    cluster = ClusterFacts(
        world=each("world"), levels=levels, reach=each("reach"), memory_gib=each("memory_gib"),
        peak_tflops={name: np.array([c.peak_tflops[name] for c in clusters], float) for name in PRECISIONS},
        memory_gb_s=each("memory_gb_s"), units=each("units"), watts=each("watts"), host_gb_s=each("host_gb_s"),
    )  # fmt: skip
    return stack_models([row.model for row in rows]), cluster, layouts


def estimate_rows(rows: Sequence[PublishedRun], cal: Calibration) -> Estimates:
    """The estimate of every row by one calibration."""
    return estimate(*gather_rows(rows), cal)
