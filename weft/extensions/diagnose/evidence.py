"""What the folder of a run holds, as the causes need it. Damaged files count as missing. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.job.errors import WeftError
from weft.job.files.run_folder import RunDir
from weft.job.load import read_job
from weft.job.schema import Job
from weft.planner.job_estimate import estimate_job
from weft.planner.plan import Plan
from weft.watch.journal import read_jsonl, read_metrics

MAX_WARMUP_STEPS = 5
"""First steps of a run that are left out: they compile, connect and fill caches."""
MIN_STEPS = 8
"""Steps that a comparison needs."""
MAX_RANKS = 1 << 20
"""Ranks of a plan that is not damaged."""
MAX_FILE_MIB = 512
"""Larger files are not read as a whole."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RankTable:
    """Figures of steps and ranks: seconds[step], and [step, rank] for the others."""

    steps: list[int]
    seconds: Floats
    figures: dict[str, Floats]
    waits: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def ranks(self) -> int:
        return int(self.figures["busy_s"].shape[1])

    def get(self, name: str) -> Floats:
        """A figure; zeros where the run did not record it."""
        return self.figures.get(name, np.zeros((len(self), self.ranks)))

    def core_wait_share(self, ranks: slice = slice(None)) -> float:
        """Share of the steps' time in which the ranks could run and had no core."""
        return float(self.get("core_wait_s")[:, ranks].mean(axis=1).sum() / self.seconds.sum())

    def part(self, start: int, end: int) -> RankTable:
        rows = slice(start, end)
        return RankTable(
            self.steps[rows], self.seconds[rows], {k: v[rows] for k, v in self.figures.items()},
            {k: v[rows] for k, v in self.waits.items()},
        )  # fmt: skip

    def halves(self) -> tuple[RankTable, RankTable]:
        middle = len(self) // 2
        return self.part(0, middle), self.part(middle, len(self))


@dataclass
class RunEvidence:
    """A run's files."""

    run: RunDir
    job: Job | None
    plan: Plan | None
    records: list[dict[str, Any]]
    """The steps after the first ones."""
    events: list[dict[str, Any]]
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Failure records of ranks, the first one first."""
    pipeline: dict[str, Any] = field(default_factory=dict)
    traces: list[dict[str, Any]] = field(default_factory=list)
    """Summaries of traced steps."""

    @cached_property
    def table(self) -> RankTable | None:
        return rank_table(self.records)

    @cached_property
    def step_s(self) -> float:
        """Median time of a step; 0 if unknown."""
        times = [r["step_time_s"] for r in self.records if r.get("step_time_s")]
        return float(np.median(times)) if times else 0.0

    @cached_property
    def cores(self) -> int:
        """Cores of a machine of the run; 0 if unknown."""
        return next((n for e in self.events if isinstance(n := e.get("cores"), int) and 0 < n < 1 << 16), 0)

    @property
    def cuda(self) -> bool:
        return self.plan is not None and self.plan.device == "cuda"

    def estimate(self, plan: Plan) -> dict[str, Any] | None:
        """The planner's estimate of the job under a plan; None where it has none."""
        if self.job is None:
            return None
        try:
            return estimate_job(self.job, plan)
        except Exception:  # the files of a damaged or foreign run may describe anything
            return None

    @cached_property
    def planned(self) -> dict[str, Any] | None:
        """The estimate of the run's own plan."""
        return None if self.plan is None else self.estimate(self.plan)

    def faults(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e.get("event") == "fault" and e.get("fault") == kind]


def read_evidence(run: RunDir) -> RunEvidence:
    """Read a run's folder."""
    events = read_jsonl(run.events)
    records = [r for r in read_metrics(run.metrics) if (number(r.get("step")) or 0.0) > _layout_since(events)]
    warmup = min(MAX_WARMUP_STEPS, len(records) // 5)
    return RunEvidence(
        run, _job(run), _plan(run), records[warmup:], events, _failures(run), _json(run.pipeline),
        [found for path in sorted(run.path.glob("traces/*.summary.json")) if (found := _json(path))],
    )  # fmt: skip


def _layout_since(events: Sequence[Mapping[str, Any]]) -> float:
    """The step after which the run has had its last layout: steps of others cannot be compared with it."""
    starts = [e for e in events if e.get("event") == "start"]
    changed = [b for a, b in pairwise(starts) if (a.get("layout"), a.get("world")) != (b.get("layout"), b.get("world"))]
    return number(changed[-1].get("step")) or 0.0 if changed else 0.0


def _job(run: RunDir) -> Job | None:
    try:
        return read_job(run.job)
    except (WeftError, OSError, ValueError):
        return None


def _plan(run: RunDir) -> Plan | None:
    raw = _json(run.plan)
    try:
        plan = Plan.from_json(raw)
        return plan if 1 <= plan.world <= MAX_RANKS and min(plan.microbatch, plan.accumulation) >= 1 else None
    except (TypeError, ValueError):
        return None


def _json(path: Any) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_MIB << 20:
            return {}
        found = json.loads(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _failures(run: RunDir) -> list[dict[str, Any]]:
    found = [f for path in sorted(run.logs.glob("failure-*.json")) if (f := _json(path))]
    return sorted(found, key=lambda f: (bool(f.get("echo")), number(f.get("time")) or 0.0))


def number(value: Any) -> float | None:
    """A finite number, or None."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
    return float(value) if good else None


def rank_table(records: Sequence[Mapping[str, Any]]) -> RankTable | None:
    """The figures of all ranks in the steps that have them; None if there are too few. After a change of the number of
    ranks, the newest steps."""
    rows = [(r, r["ranks"]) for r in records if isinstance(r.get("ranks"), dict) and number(r.get("step_time_s"))]
    if not rows:
        return None
    keys = [k for k, v in rows[-1][1].items() if isinstance(v, list)]
    waits = rows[-1][1].get("wait_s")
    axes = list(waits) if isinstance(waits, dict) else []
    width = len(rows[-1][1].get("busy_s") or ())
    kept: list[tuple[Mapping[str, Any], list[list[float]]]] = []
    for record, figures in rows:
        wait = figures.get("wait_s") if isinstance(figures.get("wait_s"), dict) else {}
        lists = [figures.get(k) for k in keys] + [wait.get(axis, [0.0] * width) for axis in axes]
        if all(isinstance(v, list) and len(v) == width and all(number(x) is not None for x in v) for v in lists):
            kept.append((record, lists))
    if "busy_s" not in keys or width == 0 or len(kept) < MIN_STEPS:
        return None
    data = np.array([lists for _, lists in kept], dtype=np.float64)
    columns = {name: data[:, i] for i, name in enumerate([*keys, *axes])}
    return RankTable(
        [int(r["step"]) for r, _ in kept], np.array([float(r["step_time_s"]) for r, _ in kept]),
        {k: columns[k] for k in keys}, {a: columns[a] for a in axes},
    )  # fmt: skip
