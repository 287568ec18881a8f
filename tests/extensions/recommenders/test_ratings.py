"""Ratings: both file formats, held-out items, drawn items, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.data.open_dataset import open_dataset
from weft.job import JobError, parse_job
from weft.job.shapes import resolve

TABLES = [{"name": "user", "rows": 3}, {"name": "item", "rows": 6, "pooling": "none"}]
EVENTS = [(1, 10, 5), (1, 20, 3), (2, 10, 4), (3, 30, 9), (2, 40, 8), (1, 50, 7), (3, 60, 1), (2, 60, 2)]
"""User, item and time."""


def write(folder: Path, original: bool) -> Path:
    folder.mkdir()
    lines = [f"{u}\t{i}\t3\t{t}" for u, i, t in EVENTS]
    if original:
        (folder / "u.data").write_text("\n".join(lines) + "\n")
        (folder / "u.user").write_text("1|24|M|artist|0\n2|53|F|doctor|0\n3|17|M|artist|0\n")
        genres = {10: "101", 20: "010", 30: "111", 40: "000", 50: "001", 60: "100"}
        (folder / "u.item").write_text("".join(f"{i}|t|d||u|{'|'.join(g)}\n" for i, g in genres.items()))
    else:
        (folder / "ml-100k.inter").write_text("\n".join(["user_id:token\titem_id:token\tr\tt", *lines]))
    return folder


def open_ratings(folder: Path, tables: list[dict[str, Any]] = TABLES, **data: Any) -> Any:
    job = {"model": {"family": "dlrm", "tables": tables}, "data": {"source": str(folder), **data}}
    return open_dataset(resolve(parse_job(job)))


def test_the_last_item_of_each_user_is_held_out(tmp_path: Path) -> None:
    for original in (True, False):
        found = open_ratings(write(tmp_path / str(original), original), negatives=2)
        assert (found.train_len, found.val_len) == (5, 3)
        held = sorted((int(s["inputs/user"]), int(s["inputs/item"][0])) for s in map(found.val, range(3)))
        assert held == [(0, 4), (1, 3), (2, 2)]  # items 50, 40 and 30
        sample = found.val(0)
        assert sample["inputs/item"].shape == sample["targets"].shape == (100,)
        assert sample["targets"].tolist() == [1.0] + [0.0] * 99


def test_drawn_items_were_not_rated_and_depend_on_the_epoch(tmp_path: Path) -> None:
    found = open_ratings(write(tmp_path / "ml", True), negatives=20)
    rated = {u: {i // 10 - 1 for v, i, _ in EVENTS if v == u + 1} for u in range(3)}
    for index in range(found.train_len):
        first, again, later = (found.train(index, epoch) for epoch in (0, 0, 1))
        assert not rated[int(first["inputs/user"])] & set(first["inputs/item"][1:].tolist())
        assert np.array_equal(first["inputs/item"], again["inputs/item"])
        assert not np.array_equal(first["inputs/item"], later["inputs/item"])


def test_features_of_users_and_items(tmp_path: Path) -> None:
    tables = [*TABLES, {"name": "genres", "rows": 3, "pooling": "mean"}, {"name": "age", "rows": 7}]
    sample = open_ratings(write(tmp_path / "ml", True), tables).val(0)
    user, item = int(sample["inputs/user"]), int(sample["inputs/item"][0])
    assert int(sample["inputs/age"]) == {0: 1, 1: 5, 2: 0}[user]
    genres = {4: [2, -1, -1], 3: [-1, -1, -1], 2: [0, 1, 2]}
    assert sample["inputs/genres"][0].tolist() == genres[item]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([{"name": "user", "rows": 2}, TABLES[1]], "user has rows=2, and data.source .* has 3 of user; rows=3 would"),
        ([*TABLES, {"name": "shop", "rows": 2}], "has user, item.*and model.tables looks up 'shop'"),
    ],
)
def test_tables_that_do_not_fit_the_data(tmp_path: Path, tables: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(JobError, match=message):
        open_ratings(write(tmp_path / "ml", False), tables)


def test_damaged_ratings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("1\t2\t3\n")
    with pytest.raises(JobError, match="no lines of user, item, rating and time"):
        open_ratings(tmp_path)
