"""Disks: whether checkpoints fit on one, and how long one lasts that holds states."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from weft.hardware.probe import GIB
from weft.job.errors import FitError
from weft.job.files.store_path import StorePath, as_path
from weft.job.optim import OPTIMIZERS
from weft.job.schema import Job
from weft.planner.model.counts import count_parameters
from weft.planner.plan import Plan

TBW_PER_TB = 600.0
"""Terabytes that may be written to a disk for each terabyte of its size, where memory.disk_tbw is not set: usual for
consumer NVMe disks; those for servers last 3 to 10 times as long."""
DAY_S = 86_400.0


def existing_parent(folder: str | Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    path = Path(folder).expanduser().resolve()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def free_gib(folder: str | Path) -> float:
    """Free space where a folder is, or will be made; infinite where the file system has no size, such as /proc."""
    usage = shutil.disk_usage(existing_parent(folder))
    return usage.free / GIB if usage.total else math.inf


def checkpoint_gib(job: Job) -> float | None:
    """Size of a checkpoint: master weights, moments and averages in fp32. None for a model of your own."""
    counts = count_parameters(job.model)
    if counts is None:
        return None
    numbers = 1 + OPTIMIZERS[job.optim.name].state_per_parameter(job.optim) + bool(job.train.ema)
    return 4 * numbers * counts.total / GIB


def check_checkpoint_space(job: Job, plan: Plan) -> None:
    """Refuse a job whose checkpoint the disk cannot hold, beside states on the same disk."""
    size = checkpoint_gib(job)
    if size is None or job.cluster.nodes > 1 or job.checkpoint.none:
        return
    folder = as_path(job.checkpoint.to or job.runs_dir)
    if isinstance(folder, StorePath):
        return
    field = "checkpoint.to" if job.checkpoint.to else "runs_dir"
    free, states = free_gib(folder), 0.0
    if plan.disk and _device(plan.disk) == _device(folder):
        states = plan.world * sum(row["gib"] for row in plan.homes if row["home"] == "disk")
    if size + states > free:
        beside = f" besides {states:.2f} GiB of states (memory.disk={plan.disk})" if states else ""
        raise FitError(
            f"a checkpoint of {size:.2f} GiB does not fit{beside}: the disk of {field}={folder} has {free:.2f} "
            f"GiB free; free the space, or set {field} to a folder on a larger disk"
        )


def _device(folder: str | Path) -> int:
    return os.stat(existing_parent(folder)).st_dev


def endurance_line(job: Job, plan: Plan, step_s: float | None) -> str | None:
    """What is written to memory.disk in a day, beside what the disk may take in its life; None without states there."""
    moved = sum(row["moved_gib"] for row in plan.homes if row["home"] == "disk")
    written = plan.world / plan.nodes * moved * GIB / 1e12
    if not written:
        return None
    size = shutil.disk_usage(existing_parent(plan.disk)).total / 1e12
    limit = job.memory.disk_tbw or TBW_PER_TB * size
    source = "memory.disk_tbw" if job.memory.disk_tbw else f"usual for {size:.2g} TB; memory.disk_tbw sets it"
    each = written * DAY_S / step_s if step_s else written
    what, unit = ("a day", "days") if step_s else ("a step", "steps")
    return (
        f"{each * 1e3:,.3g} GB {what} are written to memory.disk; an endurance of {limit:,.4g} TB ({source}) lasts "
        f"{limit / each:,.0f} {unit}"
    )
