"""Places embedding tables on ranks: how each is spread, where, and what it takes of memory and of the links."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from weft.hardware.probe import probe
from weft.job.errors import FitError
from weft.job.schema import EmbeddingTable, Job
from weft.planner.plan import Plan

GIB, MIB = 2**30, 2**20
MIN_CACHE_ROWS = 65_536
"""Default cache of a host table, where a tenth of its rows is less."""
PLACE_BYTES = 9
"""Bytes on the device for each row of a host table: its place in the cache, and whether it was used."""
STATE_VALUES: dict[str, tuple[int, int]] = {"sgd": (0, 0), "adagrad": (0, 1), "adam": (2, 0), "rowwise_adam": (1, 1)}
"""By model.table_optim.name, the optimizer's values for each value of a row, and for each row."""


def row_bytes(job: Job, table: EmbeddingTable) -> int:
    """Bytes of one row with its optimizer states, in fp32."""
    full, per_row = STATE_VALUES[job.model.table_optim.name]
    return 4 * (_dim(job, table) * (1 + full) + per_row)


def with_tables(job: Job, plan: Plan, memory_gib: float) -> Plan:
    """The plan with every table placed. A FitError if a rank's tables exceed its memory.

    The largest tables come first: one that is larger than an even share of all goes to all ranks by rows, any other to
    the rank with the least memory and traffic so far.
    """
    if not job.model.tables:
        return plan
    world, optim = plan.dp, job.model.table_optim
    sizes = {t.name: t.rows * row_bytes(job, t) for t in job.model.tables}
    free = [t for t in job.model.tables if t.spread == "auto"]
    share = sum(sizes.values()) / world
    held, moved = [0.0] * world, [0.0] * world
    chosen: dict[str, dict[str, Any]] = {}
    for table in sorted(job.model.tables, key=lambda t: (t.spread == "auto", -sizes[t.name])):
        spread = table.spread
        if spread == "auto":
            spread = "row" if world > 1 and len(free) and sizes[table.name] > share else "table"
        row = _placed(job, table, spread, plan)
        if spread == "table":
            total, traffic = sum(held) or 1.0, sum(moved) or 1.0
            row["rank"] = min(range(world), key=lambda r: (held[r] / total + moved[r] / traffic, r))
            held[row["rank"]] += row["device_gib"]
            moved[row["rank"]] += row["traffic_mib"]
        else:
            held = [h + row["device_gib"] for h in held]
            moved = [m + row["traffic_mib"] / world for m in moved]
        chosen[table.name] = row
    rows = tuple(chosen[t.name] for t in job.model.tables)
    settings = {
        "name": optim.name, "lr_factor": (optim.lr or job.optim.lr) / job.optim.lr, "eps": optim.eps,
        "betas": list(optim.betas),
    }  # fmt: skip
    plan = replace(plan, tables=rows, table_optim=settings)
    _check_fits(plan, memory_gib)
    if job.cluster.device in ("auto", "cpu", "cuda") and job.cluster.nodes == 1:
        _check_host(plan)
    return plan


def _placed(job: Job, table: EmbeddingTable, spread: str, plan: Plan) -> dict[str, Any]:
    """A table's row of the plan. `device_gib` and `host_gib` are of a rank that holds a part."""
    dim, world, bytes_a_row = _dim(job, table), plan.dp, row_bytes(job, table)
    rows, width = table.rows, dim
    if spread == "row":
        rows = ceil(rows / world)
    if spread == "column":
        width = ceil(dim / world)
    gib = rows * bytes_a_row * width / dim / GIB
    cache = None
    if table.home == "host":
        cache = min(rows, table.cache_rows or max(MIN_CACHE_ROWS, rows // 10))
    # a rank asks for the rows of its share of the batch, at most each once, and sends as many gradients
    asked = min(table.rows, job.train.global_batch // world)
    sent = {"replicate": asked * dim * 4 * (world - 1)}.get(spread, 2 * asked * dim * 4 * (world - 1) / world)
    return {
        "name": table.name, "rows": table.rows, "dim": dim, "spread": spread, "rank": None, "home": table.home,
        "cache_rows": cache, "gib": table.rows * bytes_a_row / GIB,
        "device_gib": gib if cache is None else (cache * bytes_a_row * width / dim + rows * PLACE_BYTES) / GIB,
        "host_gib": gib if cache is not None else 0.0, "traffic_mib": sent / MIB,
    }  # fmt: skip


def _dim(job: Job, table: EmbeddingTable) -> int:
    return table.dim or job.model.dim or 1


def rank_gib(plan: Plan, kind: str = "device_gib") -> list[float]:
    """GiB of tables in the device memory, or in the host memory, of each rank."""
    return [sum(row[kind] for row in plan.tables if row["rank"] in (None, rank)) for rank in range(plan.dp)]


def _check_fits(plan: Plan, memory_gib: float) -> None:
    largest = max(plan.tables, key=lambda row: row["device_gib"])
    needed = max(rank_gib(plan))
    if needed > memory_gib:
        ways = ["more ranks", f"home: host for {largest['name']} (model.tables)"]
        if largest["spread"] in ("table", "replicate") and plan.dp > 1:
            ways.insert(0, f"spread: row for {largest['name']} (model.tables)")
        raise FitError(
            f"the embedding tables need {needed:.2f} GiB on a rank, and {plan.device_name} has {memory_gib:.2f}; the "
            f"largest, {largest['name']}, takes {largest['device_gib']:.2f}; {' or '.join(ways)} would need less"
        )


def _check_host(plan: Plan) -> None:
    """Refuse host tables that exceed the memory of this machine, on which all ranks are."""
    on_host = sum(rank_gib(plan, "host_gib"))
    if on_host > (limit := probe().memory_gib):
        raise FitError(
            f"the embedding tables with home: host need {on_host:.2f} GiB, and this machine has {limit:.2f}; fewer "
            "rows or more nodes would need less"
        )


def table_lines(plan: Plan) -> list[str]:
    """A line for each table: where it is and what it takes."""
    wide = max((len(row["name"]) for row in plan.tables), default=0)
    lines = []
    for row in plan.tables:
        where = {"table": f"on rank {row['rank']}", "replicate": f"a copy on each of {plan.dp} ranks"}.get(
            row["spread"], f"by {row['spread']}s over {plan.dp} ranks"
        )
        where = "on the device" if plan.dp == 1 else where
        cache = f", in host memory with {row['cache_rows']} rows cached" if row["home"] == "host" else ""
        lines.append(
            f"{row['name']:{wide}}  {row['rows']} × {row['dim']}, {_size(row['gib'])}, {where}{cache}"
            + (f", {row['traffic_mib']:.2f} MiB a rank and step" if plan.dp > 1 else "")
        )
    return lines


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.2f} MiB"
