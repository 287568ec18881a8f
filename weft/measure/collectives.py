"""`weft bench collectives`: times collectives by dtype, algorithm and size on the axes of a mesh, and fits lines.

It runs on local ranks of its own, or on those that torchrun or mpirun started, on one or several nodes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from weft.comm.algorithms import ALGORITHMS
from weft.hardware.linear_fit import fit_line
from weft.hardware.rank_environment import RankInfo, export_torchrun_variables, launcher_backend, rank_info
from weft.job.comm import BACKENDS
from weft.job.errors import FitError, JobError, MachineError
from weft.launch.rank_pool import RankPool
from weft.measure.collective_times import DTYPES, KINDS, Case, cases, measure
from weft.mesh import connect
from weft.planner.engine_constants import RANK_PROCESS_BYTES
from weft.planner.plan import AXES, Plan
from weft.planner.rules.layout_syntax import parse_layout
from weft.planner.rules.layout_syntax import ranks as ranks_of
from weft.watch.collectives_page import write_collectives_page

SIZE_FACTOR = 4
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
CPU_RANKS = 4
EVERYONE = "everyone"
MESSAGES = 3
"""Tensors of the largest size that a rank holds: what it sends, what it receives, and the backend's copy."""


@dataclass(frozen=True)
class CollectiveTime:
    """One measured case, with the algorithm and bus bandwidth of nccl-tests."""

    kind: str
    algorithm: str
    dtype: str
    bytes: int
    seconds: float
    algbw_gb_s: float
    busbw_gb_s: float
    axis: str = EVERYONE
    group: int = 0
    """Ranks in a group."""


@dataclass(frozen=True)
class FittedLine:
    """seconds = alpha_s + beta_s_per_byte · bytes, over all sizes of one axis, kind, algorithm and dtype."""

    kind: str
    algorithm: str
    dtype: str
    alpha_s: float
    beta_s_per_byte: float
    busbw_gb_s: float | None
    """The bus bandwidth for large sizes; None if the time does not grow with size."""
    axis: str = EVERYONE


@dataclass(frozen=True)
class CollectiveTimes:
    """The result of one call of the benchmark."""

    ranks: int
    device: str
    backend: str
    torch: str
    rows: tuple[CollectiveTime, ...]
    lines: tuple[FittedLine, ...]
    seconds: float
    nodes: int = 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_size(text: str) -> int:
    """Parse 1K, 64M or a number of bytes."""
    digits, unit = text.upper().removesuffix("B").removesuffix("I"), ""
    if digits and digits[-1] in UNITS:
        digits, unit = digits[:-1], digits[-1]
    if not digits.isdigit() or int(digits) < 1:
        raise JobError(f"the size {text!r} is not known; write bytes, or 1K, 64M, 1G")
    return int(digits) * UNITS[unit]


def sizes_between(smallest: int, largest: int) -> list[int]:
    """Sizes from the smallest, each four times the one before, and the largest."""
    if smallest > largest:
        raise JobError(f"--min {smallest} bytes is more than --max {largest}; --max {smallest} or more would work")
    found = []
    while smallest < largest:
        found.append(smallest)
        smallest *= SIZE_FACTOR
    return [*found, largest]


def chosen(given: str | None, known: Sequence[str], option: str) -> list[str]:
    """The names in a comma-separated option; all, if it is left out."""
    names = given.replace("-", "_").split(",") if given else list(known)
    for name in names:
        if name not in known:
            raise JobError(f"{option} {name!r} is not known; use {', '.join(known)}")
    return names


def where(nproc: int | None, device: str, here: RankInfo | None = None) -> tuple[int, str, str]:
    """Ranks, device and backend: of the ranks that were started, else several GPUs, else CPU ranks."""
    gpus = torch.cuda.device_count()
    if device not in ("auto", "cpu", "cuda"):
        raise JobError(f"--device {device!r} is not known; use auto, cpu or cuda")
    if device == "cuda" and not gpus:
        raise MachineError("--device cuda, but torch sees no GPU here; --device cpu would work")
    kind = device if device != "auto" else ("cuda" if gpus > 1 else "cpu")
    if here is not None:
        own = kind == "cuda" and here.local_world <= gpus
        launched = launcher_backend() if kind == "cpu" else ""
        return here.world, kind, "nccl" if own else launched if launched and launched in BACKENDS else "gloo"
    ranks = nproc or (max(2, gpus) if kind == "cuda" else CPU_RANKS)
    if ranks < 2:
        raise JobError("--nproc 1: a collective needs at least two ranks; --nproc 2 would work")
    return ranks, kind, "nccl" if kind == "cuda" and ranks <= gpus else "gloo"


def plan_of(ranks: int, kind: str, backend: str, nodes: int, layout: str | None) -> Plan:
    """The plan of the mesh: of the given layout, else all ranks on one axis."""
    section = parse_layout(layout) if layout else {"dp_replicate": ranks}
    degrees: dict[str, Any] = {axis: section.get(axis, 1) for axis in AXES}
    plan = Plan(kind, kind, backend, nodes=nodes, **degrees)
    if plan.world != ranks:
        raise JobError(
            f"--layout {layout!r} is of {plan.world} ranks, and there are {ranks}; --nproc {plan.world} would work"
        )
    return plan


def axes_of(plan: Plan, given: str | None) -> list[str]:
    """The axes to measure: those that were named, else every axis of several ranks, and all ranks."""
    wide = [axis for axis, degree in plan.axes.items() if degree > 1]
    known = [*wide, EVERYONE] if len(wide) > 1 else [EVERYONE, *wide]
    return chosen(given, known, "--axes") if given else known[: len(known) if len(wide) > 1 else 1]


Times = dict[str, list[tuple[int, float]]]


def on_rank(plan: Plan, wanted: list[Case], axes: list[str], budget_s: float) -> list[Times]:
    """Measure on one rank; all groups of an axis at once, as in training. Returns the times of every rank."""
    mesh = connect(plan, 120.0)
    assert mesh.everyone is not None
    found: Times = {}
    for name in axes:
        axis = mesh.everyone if name == EVERYONE else mesh.axes[name]
        axis.open()
        found[name] = measure(axis, mesh.device, wanted, budget_s)
    times = mesh.all_gather_json(found)
    mesh.close()
    return cast(list[Times], times)


def bench(
    pool: RankPool | None, wanted: list[Case], plan: Plan, seconds: float, axes: Sequence[str] = (EVERYONE,)
) -> CollectiveTimes:
    """Measure the cases in about `seconds`, on the ranks of a pool or, without one, as this process's own rank.

    The time of a case is that of the slowest rank.
    """
    began, names = time.perf_counter(), list(axes)
    budget = seconds / max(1, len(wanted) * len(names))
    work = (plan, wanted, names, budget)
    times = pool.run(on_rank, plan.world, *work)[0] if pool else on_rank(*work)
    rows = []
    for name in names:
        size = plan.world if name == EVERYONE else plan.axes[name]
        for i, case in enumerate(wanted):
            bytes_, took = times[0][name][i][0], max(rank[name][i][1] for rank in times)
            speed = bytes_ / took / 1e9
            bus = speed * KINDS[case.kind].bus(size)
            rows.append(CollectiveTime(case.kind, case.algorithm, case.dtype, bytes_, took, speed, bus, name, size))
    took = time.perf_counter() - began
    return CollectiveTimes(
        plan.world, plan.device, plan.backend, torch.__version__, tuple(rows), lines_of(rows), took, plan.nodes
    )


def lines_of(rows: Sequence[CollectiveTime]) -> tuple[FittedLine, ...]:
    """Fit a line for each axis, kind, algorithm and dtype."""
    found = []
    for (axis, kind, by, dtype), group in groupby(rows, lambda r: (r.axis, r.kind, r.algorithm, r.dtype)):
        some = list(group)
        alpha, beta = fit_line([r.bytes for r in some], [r.seconds for r in some])
        speed = KINDS[kind].bus(some[0].group) / beta / 1e9 if beta > 0 else None
        found.append(FittedLine(kind, by, dtype, alpha, beta, speed, axis))
    return tuple(found)


def human(size: int) -> str:
    for unit, scale in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if size >= scale:
            return f"{size / scale:.4g}{unit}"
    return str(size)


def show(found: CollectiveTimes) -> str:
    """The tables for a terminal: the time at each size, and the fitted lines."""
    several = len({r.axis for r in found.rows}) > 1

    def head(axis: str) -> str:
        return f"{axis:14}" if several else ""

    nodes = f" on {found.nodes} nodes" if found.nodes > 1 else ""
    rows = [
        f"{found.ranks} ranks{nodes} over {found.backend} on {found.device}, torch {found.torch}, "
        f"{found.seconds:.0f} s; bandwidths as nccl-tests define them", "",
        f"{head('axis')}{'collective':15}{'by':14}{'dtype':6}{'size':>8}{'time µs':>11}{'algbw GB/s':>12}"
        f"{'busbw GB/s':>12}",
    ]  # fmt: skip
    for r in found.rows:
        rows.append(
            f"{head(r.axis)}{r.kind:15}{r.algorithm:14}{r.dtype:6}{human(r.bytes):>8}{r.seconds * 1e6:11.1f}"
            f"{r.algbw_gb_s:12.4g}{r.busbw_gb_s:12.4g}"
        )
    rows += [
        "",
        "time = α + β · bytes",
        f"{head('axis')}{'collective':15}{'by':14}{'dtype':6}{'α µs':>11}{'β ns/KiB':>12}{'busbw GB/s':>12}",
    ]
    for x in found.lines:
        speed, slope = f"{x.busbw_gb_s:.3f}" if x.busbw_gb_s else "–", x.beta_s_per_byte * 1e9 * 1024
        rows.append(
            f"{head(x.axis)}{x.kind:15}{x.algorithm:14}{x.dtype:6}{x.alpha_s * 1e6:11.1f}{slope:12.1f}{speed:>12}"
        )
    return "\n".join(rows)


def check_memory(ranks: int, largest: int) -> None:
    """Ranks of one machine fit into its free memory."""
    each, free = RANK_PROCESS_BYTES + MESSAGES * largest, psutil.virtual_memory().available
    if ranks * each > free:
        works = f"--nproc {free // each}" if free // each > 1 else "a smaller --max"
        raise FitError(
            f"--nproc {ranks}: {ranks} ranks take about {ranks * each / 2**30:.0f} GiB of memory with messages of "
            f"{human(largest)}, and {free / 2**30:.0f} GiB are free; {works} would work"
        )


def measure_collectives(
    nproc: int | None, kinds: str | None, algorithms: str | None, dtypes: str, smallest: str, largest: str,
    device: str, seconds: float, html: Path | None, layout: str | None = None, axes: str | None = None,
) -> CollectiveTimes | None:  # fmt: skip
    """Measure, and write the page if one is asked for. Under torchrun or mpirun only rank 0 has the results."""
    here = rank_info() if export_torchrun_variables() else None
    ranks, kind, backend = where(nproc if nproc or not layout else ranks_of(parse_layout(layout)), device, here)
    plan = plan_of(ranks, kind, backend, here.world // here.local_world if here else 1, layout)
    names = axes_of(plan, axes)
    wanted = cases(
        chosen(kinds, list(KINDS), "--kinds"),
        chosen(algorithms, ALGORITHMS, "--algorithms"),
        chosen(dtypes, list(DTYPES), "--dtypes"),
        sizes_between(read_size(smallest), read_size(largest)),
    )
    if not wanted:
        raise JobError(f"--kinds {kinds} is not done by --algorithms {algorithms}; native does every kind")
    if here is not None:
        found = bench(None, wanted, plan, seconds, names)
        if here.rank > 0:
            return None
    else:
        check_memory(ranks, read_size(largest))
        count = len(wanted) * len(names)
        print(f"measuring {count} cases on {ranks} ranks …", file=sys.stderr, flush=True)
        with RankPool(timeout_s=600) as pool:
            found = bench(pool, wanted, plan, seconds, names)
    if html is not None:
        print(f"written: {write_collectives_page(html, found.to_json())}", file=sys.stderr)
    return found
