"""`weft bench collectives`: local ranks, every collective, dtype, algorithm and size; what it took, and the lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from weft.comm.algorithms import ALGORITHMS
from weft.comm.bench import DTYPES, KINDS, Case, cases, measure
from weft.hardware.lines import fit_line
from weft.job.errors import JobError, MachineError
from weft.launch.pool import RankPool
from weft.mesh import connect
from weft.plan.layout import Plan
from weft.watch.collectives_page import write_collectives_page

SMALLEST, LARGEST, FACTOR = 1024, 4 * 2**20, 4
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
CPU_RANKS = 4


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


@dataclass(frozen=True)
class Line:
    """seconds = alpha_s + beta_s_per_byte · bytes, over all sizes of one kind, algorithm and dtype."""

    kind: str
    algorithm: str
    dtype: str
    alpha_s: float
    beta_s_per_byte: float
    busbw_gb_s: float | None
    """What the line tends to with size; None if time does not grow with size here."""


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


def where(nproc: int | None, device: str) -> tuple[int, str, str]:
    """Ranks, device and backend: GPUs where there are several, else CPU ranks."""
    gpus = torch.cuda.device_count()
    if device not in ("auto", "cpu", "cuda"):
        raise JobError(f"--device {device!r} is not known; use auto, cpu or cuda")
    if device == "cuda" and not gpus:
        raise MachineError("--device cuda, but torch sees no GPU here; --device cpu would work")
    kind = device if device != "auto" else ("cuda" if gpus > 1 else "cpu")
    ranks = nproc or (max(2, gpus) if kind == "cuda" else CPU_RANKS)
    if ranks < 2:
        raise JobError("--nproc 1 has nobody to talk to; --nproc 2 would work")
    return ranks, kind, "nccl" if kind == "cuda" and ranks <= gpus else "gloo"


def on_rank(plan: Plan, asked: list[Case], budget_s: float) -> list[tuple[int, float]]:
    """What each rank does."""
    mesh = connect(plan, 120.0)
    assert mesh.everyone is not None
    mesh.everyone.open()
    return measure(mesh.everyone, mesh.device, asked, budget_s)


def bench(pool: RankPool, asked: list[Case], ranks: int, device: str, backend: str, seconds: float) -> Found:
    """Measure the cases on a pool's ranks, in about so many seconds; the slowest rank's time counts."""
    began = time.perf_counter()
    plan = Plan(device, device, backend, dp_replicate=ranks)
    told = pool.run(on_rank, ranks, plan, asked, seconds / max(1, len(asked)))
    rows = []
    for case, *seen in zip(asked, *told, strict=True):
        size, took = seen[0][0], max(t for _, t in seen)
        speed = size / took / 1e9
        rows.append(Row(case.kind, case.algorithm, case.dtype, size, took, speed, speed * KINDS[case.kind].bus(ranks)))
    return Found(
        ranks, device, backend, torch.__version__, tuple(rows), lines_of(rows, ranks), time.perf_counter() - began
    )


def lines_of(rows: Sequence[Row], ranks: int) -> tuple[Line, ...]:
    """The fitted line of each kind, algorithm and dtype."""
    found = []
    for (kind, by, dtype), group in groupby(rows, lambda r: (r.kind, r.algorithm, r.dtype)):
        some = list(group)
        alpha, beta = fit_line([r.bytes for r in some], [r.seconds for r in some])
        speed = KINDS[kind].bus(ranks) / beta / 1e9 if beta > 0 else None
        found.append(Line(kind, by, dtype, alpha, beta, speed))
    return tuple(found)


def human(size: int) -> str:
    for unit, scale in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if size >= scale:
            return f"{size / scale:.4g}{unit}"
    return str(size)


def show(found: Found) -> str:
    """For a terminal: a row for each line, with its latency, its speed, and the time at each size."""
    rows = [
        f"{found.ranks} ranks over {found.backend} on {found.device}, torch {found.torch}, {found.seconds:.0f} s; "
        "bandwidths as nccl-tests define them", "",
        f"{'collective':15}{'by':14}{'dtype':6}{'size':>8}{'time µs':>11}{'algbw GB/s':>12}{'busbw GB/s':>12}",
    ]  # fmt: skip
    for (kind, by, dtype), group in groupby(found.rows, lambda r: (r.kind, r.algorithm, r.dtype)):
        for r in group:
            rows.append(
                f"{kind:15}{by:14}{dtype:6}{human(r.bytes):>8}{r.seconds * 1e6:11.1f}{r.algbw_gb_s:12.4g}"
                f"{r.busbw_gb_s:12.4g}"
            )
    rows += [
        "",
        "time = α + β · bytes",
        f"{'collective':15}{'by':14}{'dtype':6}{'α µs':>11}{'β ns/KiB':>12}{'busbw GB/s':>12}",
    ]
    for x in found.lines:
        speed, slope = f"{x.busbw_gb_s:.3f}" if x.busbw_gb_s else "–", x.beta_s_per_byte * 1e9 * 1024
        rows.append(f"{x.kind:15}{x.algorithm:14}{x.dtype:6}{x.alpha_s * 1e6:11.1f}{slope:12.1f}{speed:>12}")
    return "\n".join(rows)


def run_and_show(
    nproc: int | None, kinds: str | None, algorithms: str | None, dtypes: str, smallest: str, largest: str,
    device: str, seconds: float, html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure what was asked for and print it."""
    ranks, kind, backend = where(nproc, device)
    asked = cases(
        chosen(kinds, list(KINDS), "--kinds"),
        chosen(algorithms, ALGORITHMS, "--algorithms"),
        chosen(dtypes, list(DTYPES), "--dtypes"),
        sizes_between(read_size(smallest), read_size(largest)),
    )
    if not asked:
        raise JobError(f"--kinds {kinds} is not done by --algorithms {algorithms}; native does every kind")
    print(f"measuring {len(asked)} cases on {ranks} ranks …", file=sys.stderr, flush=True)
    with RankPool(timeout_s=600) as pool:
        found = bench(pool, asked, ranks, kind, backend, seconds)
    print(json.dumps(found.to_json(), indent=2) if as_json else show(found))
    if html is not None:
        print(f"written: {write_collectives_page(html, found.to_json())}", file=sys.stderr)
