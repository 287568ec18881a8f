"""Tables are placed by size and traffic, printed with their bytes, and refused where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from weft.job import JobError, parse_job
from weft.job.errors import FitError
from weft.planner import make_plan
from weft.planner.describe import describe_plan
from weft.planner.plan import Plan
from weft.planner.table_placement import rank_gib


def plan_of(tables: list[dict[str, Any]], world: int = 4, **sections: Any) -> tuple[Any, Plan]:
    job = {"model": {"family": "dlrm", "dim": 64, "tables": tables}, "data": {"source": "synthetic"}}
    return make_plan(parse_job({**job, "train": {"global_batch": 1024}, **sections}), world)


SMALL = [{"name": f"t{i}", "rows": 10_000 * (i + 1)} for i in range(8)]


def test_large_tables_go_by_rows_and_others_are_balanced() -> None:
    job, plan = plan_of([*SMALL, {"name": "large", "rows": 4_000_000}])
    placed = {row["name"]: row for row in plan.tables}
    assert placed["large"]["spread"] == "row"
    assert all(placed[t["name"]]["spread"] == "table" for t in SMALL)
    held = rank_gib(plan)
    assert max(held) < 1.1 * min(held)
    exact = sum(t.rows * 65 * 4 for t in job.model.tables) / 2**30  # 64 weights and one sum of squares
    assert sum(held) == pytest.approx(exact, rel=1e-6)
    text = describe_plan(job, plan)
    assert "large  4000000 × 64, 0.97 GiB, by rows over 4 ranks" in text
    assert "on rank 3" in text
    assert Plan.from_json(plan.to_json()) == plan


def test_traffic_of_each_spread() -> None:
    """A rank asks for at most its share of the batch, 256 rows, and sends as many gradients."""
    rows = {"row": 2 * 256 * 0.75, "column": 2 * 256 * 0.75, "table": 2 * 256 * 0.75, "replicate": 256 * 3}
    for spread, moved in rows.items():
        _, plan = plan_of([{"name": "a", "rows": 100_000, "spread": spread}])
        assert plan.tables[0]["traffic_mib"] == pytest.approx(moved * 64 * 4 / 2**20)


def test_tables_that_do_not_fit_name_the_setting() -> None:
    tables = [{"name": "huge", "rows": 40_000_000}]
    cluster = {"cluster": {"device": "cpu", "memory_gib": 4}}
    with pytest.raises(FitError, match=r"need 9.69 GiB on a rank, and cpu has 4.00.*home: host for huge") as caught:
        plan_of(tables, 1, **cluster)
    assert caught.value.exit_code == 3
    _, plan = plan_of(tables, 4, **cluster)
    assert plan.tables[0]["spread"] == "table" or max(rank_gib(plan)) < 4
    with pytest.raises(FitError, match="spread: row for huge"):
        plan_of([{**tables[0], "spread": "table"}], 4, **cluster)


def test_a_host_table_takes_its_cache_on_the_device() -> None:
    _, plan = plan_of([{"name": "a", "rows": 1_000_000, "home": "host", "cache_rows": 1000, "spread": "row"}])
    row = plan.tables[0]
    assert row["host_gib"] == pytest.approx(250_000 * 65 * 4 / 2**30)
    assert row["device_gib"] == pytest.approx((1000 * 65 * 4 + 250_000 * 9) / 2**30)


@pytest.mark.parametrize(
    ("sections", "table", "message"),
    [
        ({"parallel": {"tp": 2}}, {}, "model.tables are spread over data-parallel ranks, and parallel.tp=2"),
        ({"train": {"ema": 0.9}}, {}, "train.ema=0.9 averages weights of every step"),
        ({"train": {"sync": "local:8"}}, {}, "train.sync=local trains copies"),
        ({}, {"cache_rows": 5}, "cache_rows of a has no effect with home: device"),
    ],
)
def test_clashes_are_refused(sections: dict[str, Any], table: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        plan_of([{"name": "a", "rows": 100, **table}], 2, **sections)


def test_host_tables_must_fit_into_this_machine_but_not_a_cluster_elsewhere() -> None:
    table = {"name": "a", "rows": 10**12, "home": "host", "cache_rows": 1000, "spread": "row"}
    with pytest.raises(FitError, match=r"with home: host need .* GiB, and this machine has"):
        plan_of([table], 4, cluster={"device": "cpu", "memory_gib": 10_000})
    _, plan = plan_of([{**table, "rows": 10**9}], 8, cluster={"device": "h100-sxm", "devices_per_node": 8})
    assert sum(rank_gib(plan, "host_gib")) == pytest.approx(10**9 * 65 * 4 / 2**30)
