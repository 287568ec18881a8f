"""Correction of the calibration by the measured step times of earlier runs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from weft.job.errors import JobError, WeftError
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.job.shapes import resolve
from weft.planner.calibration import Calibration
from weft.planner.job_estimate import estimate_job
from weft.planner.plan import Plan

SPEED_FIELDS = ("matmul", "attention", "link", "network")
COST_FIELDS = ("traffic", "host_us", "host_moe_us", "step_ms", "latency", "optimizer", "sum_bytes")
"""Calibration values that the step time falls and rises with; scaled together, the whole step scales by a factor."""


@dataclass(frozen=True)
class PastRun:
    """One run: its predicted and its measured step time."""

    name: str
    device: str
    layout: str
    predicted_s: float
    measured_s: float
    predicted_gib: float
    measured_gib: float | None

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.name, "device": self.device, "layout": self.layout, "predicted_step_time_s": self.predicted_s,
            "measured_step_time_s": self.measured_s, "error": self.predicted_s / self.measured_s - 1,
            "predicted_memory_gib": self.predicted_gib, "measured_memory_gib": self.measured_gib,
        }  # fmt: skip


@dataclass(frozen=True)
class History:
    """The runs of a folder, and the correction for one device."""

    runs: tuple[PastRun, ...]
    device: str
    factor: float
    """Median of measured over predicted time on this device; 1 if there are no runs."""
    before: float
    """Mean absolute error of the predicted step time before the correction."""
    after: float
    """The same after the correction, each run corrected by the others."""
    unread: int = 0
    """Folders with a plan that could not be used: too few steps, a model of your own, or damaged files."""

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device, "runs": [r.to_json() for r in self.runs], "time_factor": self.factor,
            "mean_abs_error_before": self.before, "mean_abs_error_after": self.after, "unread": self.unread,
        }  # fmt: skip


def read_history(folder: Path, device: str, calibration: Calibration) -> tuple[History, Calibration]:
    """The runs below a folder, and the calibration corrected by those on this device."""
    if not folder.is_dir():
        raise JobError(f"--history {folder}: no such folder; use a folder of runs, such as runs/")
    paths = [folder] if (folder / "plan.json").is_file() else sorted(p.parent for p in folder.glob("*/plan.json"))
    runs = tuple(past for path in paths if (past := _read(RunDir(path), calibration)))
    unread = len(paths) - len(runs)
    here = [r for r in runs if r.device == device]
    if not here:
        return History(runs, device, 1.0, 0.0, 0.0, unread), calibration
    factor = median(r.ratio for r in here)
    before = sum(abs(1 / r.ratio - 1) for r in here) / len(here)
    after = sum(abs(_by_others(here, i) / r.ratio - 1) for i, r in enumerate(here)) / len(here)
    return History(runs, device, factor, before, after, unread), corrected(calibration, factor)


def corrected(calibration: Calibration, factor: float) -> Calibration:
    """The calibration for a machine on which everything takes `factor` times as long."""
    changed = {name: getattr(calibration, name) / factor for name in SPEED_FIELDS}
    changed |= {name: getattr(calibration, name) * factor for name in COST_FIELDS}
    return calibration.with_(**changed, name=f"{calibration.name}, corrected by runs")


def _by_others(runs: list[PastRun], i: int) -> float:
    others = [r.ratio for j, r in enumerate(runs) if j != i]
    return median(others or [runs[i].ratio])


def _read(run: RunDir, calibration: Calibration) -> PastRun | None:
    """A run with measured steps; None if it was never started, is damaged, or has a model of your own."""
    try:
        plan = Plan.from_json(json.loads(run.plan.read_text(encoding="utf-8")))
        job = resolve(load_job(str(run.path)))
        records = _records(run.metrics)
        predicted = estimate_job(job, plan, calibration)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, WeftError):
        return None  # a damaged plan or job
    times = _numbers(records, "step_time_s")
    if len(times) < 3:
        return None
    settled = times[len(times) // 5 :]  # the first steps warm up
    peaks = _numbers(records, "peak_memory_gib")
    return PastRun(
        run.path.name, plan.device_name, plan.layout(), predicted["step_time_s"], median(settled),
        predicted["peak_memory_gib"], max(peaks) if peaks else None,
    )  # fmt: skip


def _numbers(records: list[dict[str, Any]], key: str) -> list[float]:
    found = [value for r in records if isinstance(value := r.get(key), int | float)]
    return [float(value) for value in found if math.isfinite(value) and value > 0]


def _records(path: Path) -> list[dict[str, Any]]:
    out = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue  # a killed run may leave an incomplete last line
        if isinstance(value, dict):
            out.append(value)
    return out
