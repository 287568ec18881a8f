"""Embedding tables train the same run however they are spread, and their checkpoints open in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.table_runs import JOB, train_tables, with_tables
from torch import Tensor

from weft.job import parse_job
from weft.launch.rank_pool import RankPool
from weft.verify.prove import prove

TOWERS = {
    "family": "two_tower", "dim": 4, "bottom": [8], "dense_features": 3,
    "tables": [
        {"name": "user", "rows": 31, "dim": 6, "spread": "row"},
        {"name": "item", "rows": 17, "dim": 4, "tower": "item", "spread": "column"},
        {"name": "genres", "rows": 9, "dim": 5, "tower": "item", "pooling": "mean", "spread": "table"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "layouts"),
    [
        (JOB, ["ddp2", "dp_shard=2 zero=3", "hsdp"]),
        (with_tables({}, table_optim={"name": "adam"}), ["ddp4"]),
        (with_tables({"spread": "column"}, table_optim={"name": "rowwise_adam"}), ["ddp4"]),
        (with_tables({"spread": "row"}, table_optim={"name": "sgd"}), ["ddp4"]),
        ({**JOB, "model": TOWERS}, ["ddp2"]),
    ],
)
def test_same_run(pool: RankPool, raw: dict[str, Any], layouts: list[str]) -> None:
    verdicts = prove(parse_job(raw), layouts, 2, pool=pool)
    assert [(v.verdict, v.why) for v in verdicts] == [("same", None)] * len(layouts)
    tables = {f"tables.{t['name']}_weight" for t in raw["model"]["tables"]}
    assert all(tables <= v.grad_diff_by_parameter.keys() for v in verdicts)


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


def test_checkpoints_open_in_any_layout(pool: RankPool, tmp_path: Path) -> None:
    """Every tensor is the same after a load, and the run continues bit for bit in its own layout."""
    two = {"dp_replicate": 2, "dp_shard": 1}
    folder = str(tmp_path / "saved")
    saved = pool.run(train_tables, 2, JOB, two, 2, folder)[0]
    assert {"model.tables.user_weight", "optim.tables.user_weight.row_sum", "optim.tables.updates"} <= saved.keys()
    other = with_tables({"spread": "auto"})
    for raw, layout, world in (
        (other, {"dp_replicate": 1, "dp_shard": 1}, 1),
        (other, {"dp_replicate": 2, "dp_shard": 2}, 4),
        (with_tables({"spread": "column", "home": "host", "cache_rows": 4}), {"dp_shard": 2}, 2),
    ):
        equal(pool.run(train_tables, world, raw, layout, 0, None, folder)[0], saved)
    whole_run = pool.run(train_tables, 2, JOB, two, 4)[0]
    equal(pool.run(train_tables, 2, JOB, two, 2, None, folder)[0], whole_run)


@pytest.mark.parametrize("world", [1, 2])
def test_a_cache_changes_no_bit(pool: RankPool, world: int) -> None:
    """Host tables with a cache that is smaller than a batch train the same bits as tables on the device."""
    layout = {"dp_replicate": world, "dp_shard": 1}
    resident = pool.run(train_tables, world, JOB, layout, 3)[0]
    for rows in (3, 20):
        equal(pool.run(train_tables, world, with_tables({"home": "host", "cache_rows": rows}), layout, 3)[0], resident)


def test_only_used_rows_change(pool: RankPool) -> None:
    start, end = (pool.run(train_tables, 1, JOB, {"dp_replicate": 1, "dp_shard": 1}, n)[0] for n in (0, 1))
    changed = (start["model.tables.user_weight"] != end["model.tables.user_weight"]).any(1)
    used = end["optim.tables.user_weight.row_sum"] > 0
    assert torch.equal(changed, used) and 0 < int(used.sum()) < 31
