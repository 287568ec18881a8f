"""`weft bench collectives`: every collective, dtype, algorithm and size on the axes of a mesh; times, and their lines.

On local ranks of its own, or on those that torchrun or mpirun started, on as many nodes as there are.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch

from weft.comm.algorithms import ALGORITHMS
from weft.hardware.linear_fit import fit_line
from weft.hardware.rank_environment import RankInfo, export_torchrun_variables, rank_info, under_mpi
from weft.job.errors import JobError, MachineError
from weft.launch.rank_pool import RankPool
from weft.measure.collective_times import DTYPES, KINDS, Case, cases, measure
from weft.mesh import connect
from weft.planner.plan import AXES, Plan
from weft.planner.rules.layout_syntax import parse_layout
from weft.planner.rules.layout_syntax import ranks as ranks_of
from weft.watch.collectives_page import write_collectives_page

SMALLEST, LARGEST, FACTOR = 1024, 4 * 2**20, 4
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
CPU_RANKS = 4
EVERYONE = "everyone"


@dataclass(frozen=True)
class Row:
    """One measured case. Bandwidths are nccl-tests': bytes over seconds, and that times what a link carries of it."""

    kind: str
    algorithm: str
    dtype: str
    bytes: int
    seconds: float
    algbw_gb_s: float
    busbw_gb_s: float
    axis: str = EVERYONE
    group: int = 0
    """Ranks that talk together."""


@dataclass(frozen=True)
class Line:
    """seconds = alpha_s + beta_s_per_byte · bytes, over all sizes of one axis, kind, algorithm and dtype."""

    kind: str
    algorithm: str
    dtype: str
    alpha_s: float
    beta_s_per_byte: float
    busbw_gb_s: float | None
    """What the line tends to with size; None if time does not grow with size here."""
    axis: str = EVERYONE


@dataclass(frozen=True)
class Found:
    """What one call of the bench saw."""

    ranks: int
    device: str
    backend: str
    torch: str
    rows: tuple[Row, ...]
    lines: tuple[Line, ...]
    seconds: float
    nodes: int = 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_size(text: str) -> int:
    """1K, 64M or a number of bytes."""
    digits, unit = text.upper().removesuffix("B").removesuffix("I"), ""
    if digits and digits[-1] in UNITS:
        digits, unit = digits[:-1], digits[-1]
    if not digits.isdigit() or int(digits) < 1:
        raise JobError(f"the size {text!r} is not known; write bytes, or 1K, 64M, 1G")
    return int(digits) * UNITS[unit]


def sizes_between(smallest: int, largest: int) -> list[int]:
    """Each four times the one before, and the largest."""
    if smallest > largest:
        raise JobError(f"--min {smallest} bytes is more than --max {largest}; --max {smallest} or more would work")
    found = []
    while smallest < largest:
        found.append(smallest)
        smallest *= FACTOR
    return [*found, largest]


def chosen(given: str | None, known: Sequence[str], option: str) -> list[str]:
    """The names of a comma-separated option; all, if it is left out."""
    names = given.replace("-", "_").split(",") if given else list(known)
    for name in names:
        if name not in known:
            raise JobError(f"{option} {name!r} is not known; use {', '.join(known)}")
    return names


def where(nproc: int | None, device: str, here: RankInfo | None = None) -> tuple[int, str, str]:
    """Ranks, device and backend: those that were started, else GPUs where there are several, else CPU ranks."""
    gpus = torch.cuda.device_count()
    if device not in ("auto", "cpu", "cuda"):
        raise JobError(f"--device {device!r} is not known; use auto, cpu or cuda")
    if device == "cuda" and not gpus:
        raise MachineError("--device cuda, but torch sees no GPU here; --device cpu would work")
    kind = device if device != "auto" else ("cuda" if gpus > 1 else "cpu")
    if here is not None:
        own = kind == "cuda" and here.local_world <= gpus
        return here.world, kind, "nccl" if own else "mpi" if kind == "cpu" and under_mpi() else "gloo"
    ranks = nproc or (max(2, gpus) if kind == "cuda" else CPU_RANKS)
    if ranks < 2:
        raise JobError("--nproc 1 has nobody to talk to; --nproc 2 would work")
    return ranks, kind, "nccl" if kind == "cuda" and ranks <= gpus else "gloo"


def plan_of(ranks: int, kind: str, backend: str, nodes: int, layout: str | None) -> Plan:
    """The mesh that is measured: as it was said, else all ranks in one row."""
    section = parse_layout(layout) if layout else {"dp_replicate": ranks}
    degrees: dict[str, Any] = {axis: section.get(axis, 1) for axis in AXES}
    plan = Plan(kind, kind, backend, nodes=nodes, **degrees)
    if plan.world != ranks:
        raise JobError(
            f"--layout {layout!r} is of {plan.world} ranks, and there are {ranks}; --nproc {plan.world} would work"
        )
    return plan


def axes_of(plan: Plan, given: str | None) -> list[str]:
    """The groups of the mesh that are measured: those that were named, else each axis of several, and everyone."""
    wide = [axis for axis, degree in plan.axes.items() if degree > 1]
    known = [*wide, EVERYONE] if len(wide) > 1 else [EVERYONE, *wide]
    return chosen(given, known, "--axes") if given else known[: len(known) if len(wide) > 1 else 1]


Told = dict[str, list[tuple[int, float]]]


def on_rank(plan: Plan, asked: list[Case], axes: list[str], budget_s: float) -> list[Told]:
    """What each rank does, all groups of an axis at once, as they would in training. Returns what every rank saw."""
    mesh = connect(plan, 120.0)
    assert mesh.everyone is not None
    found: Told = {}
    for name in axes:
        axis = mesh.everyone if name == EVERYONE else mesh.axes[name]
        axis.open()
        found[name] = measure(axis, mesh.device, asked, budget_s)
    told = mesh.all_gather_object(found)
    mesh.close()
    return cast(list[Told], told)


def bench(
    pool: RankPool | None, asked: list[Case], plan: Plan, seconds: float, axes: Sequence[str] = (EVERYONE,)
) -> Found:
    """Measure the cases in about so many seconds, on a pool's ranks or, without one, as the rank that this process is.

    The slowest rank's time counts.
    """
    began, names = time.perf_counter(), list(axes)
    budget = seconds / max(1, len(asked) * len(names))
    told = pool.run(on_rank, plan.world, plan, asked, names, budget)[0] if pool else on_rank(plan, asked, names, budget)
    rows = []
    for name in names:
        size = plan.world if name == EVERYONE else plan.axes[name]
        for i, case in enumerate(asked):
            bytes_, took = told[0][name][i][0], max(rank[name][i][1] for rank in told)
            speed = bytes_ / took / 1e9
            bus = speed * KINDS[case.kind].bus(size)
            rows.append(Row(case.kind, case.algorithm, case.dtype, bytes_, took, speed, bus, name, size))
    took = time.perf_counter() - began
    return Found(
        plan.world, plan.device, plan.backend, torch.__version__, tuple(rows), lines_of(rows), took, plan.nodes
    )


def lines_of(rows: Sequence[Row]) -> tuple[Line, ...]:
    """The fitted line of each axis, kind, algorithm and dtype."""
    found = []
    for (axis, kind, by, dtype), group in groupby(rows, lambda r: (r.axis, r.kind, r.algorithm, r.dtype)):
        some = list(group)
        alpha, beta = fit_line([r.bytes for r in some], [r.seconds for r in some])
        speed = KINDS[kind].bus(some[0].group) / beta / 1e9 if beta > 0 else None
        found.append(Line(kind, by, dtype, alpha, beta, speed, axis))
    return tuple(found)


def human(size: int) -> str:
    for unit, scale in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if size >= scale:
            return f"{size / scale:.4g}{unit}"
    return str(size)


def show(found: Found) -> str:
    """For a terminal: a row for each line, with its latency, its speed, and the time at each size."""
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


def run_and_show(
    nproc: int | None, kinds: str | None, algorithms: str | None, dtypes: str, smallest: str, largest: str,
    device: str, seconds: float, html: Path | None, as_json: bool, layout: str | None = None, axes: str | None = None,
) -> None:  # fmt: skip
    """Measure what was asked for and print it; under torchrun or mpirun the first rank prints."""
    here = rank_info() if export_torchrun_variables() else None
    ranks, kind, backend = where(nproc if nproc or not layout else ranks_of(parse_layout(layout)), device, here)
    plan = plan_of(ranks, kind, backend, here.world // here.local_world if here else 1, layout)
    names = axes_of(plan, axes)
    asked = cases(
        chosen(kinds, list(KINDS), "--kinds"),
        chosen(algorithms, ALGORITHMS, "--algorithms"),
        chosen(dtypes, list(DTYPES), "--dtypes"),
        sizes_between(read_size(smallest), read_size(largest)),
    )
    if not asked:
        raise JobError(f"--kinds {kinds} is not done by --algorithms {algorithms}; native does every kind")
    if here is not None:
        found = bench(None, asked, plan, seconds, names)
        if here.rank > 0:
            return
    else:
        count = len(asked) * len(names)
        print(f"measuring {count} cases on {ranks} ranks …", file=sys.stderr, flush=True)
        with RankPool(timeout_s=600) as pool:
            found = bench(pool, asked, plan, seconds, names)
    print(json.dumps(found.to_json(), indent=2) if as_json else show(found))
    if html is not None:
        print(f"written: {write_collectives_page(html, found.to_json())}", file=sys.stderr)
