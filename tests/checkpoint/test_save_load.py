"""weft.parallelize, weft.save and weft.load in a custom loop."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers import on_ranks

import weft
from weft.launch.rank_pool import RankPool


def test_a_custom_loop(pool: RankPool, tmp_path: Path) -> None:
    """Two sharded ranks train and save, one rank continues: the same as one uninterrupted loop."""
    folder = str(tmp_path)
    first = pool.run(on_ranks.own_loop, 2, folder, 3)
    second = pool.run(on_ranks.own_loop, 1, folder, 3)
    whole = pool.run(on_ranks.own_loop, 1, str(tmp_path / "alone"), 6)
    assert [r[0] for r in (*first, *second, *whole)] == [0, 0, 3, 0]
    assert first[0][1] == first[1][1]
    torch.testing.assert_close(second[0][1], whole[0][1], rtol=1e-5, atol=1e-6)


def test_public_names() -> None:
    assert {"Job", "Plan", "connect", "parallelize", "save", "load", "plan", "train"} <= set(weft.__all__)
    assert weft.plan(weft.Job(), world=1).layout() == "1 rank"
    assert weft.make_plan(weft.Job(), 2)[1].world == 2
