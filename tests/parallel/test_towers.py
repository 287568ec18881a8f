"""A model with an image and a text tower is the same run in every layout, with the same metrics."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import on_ranks
from helpers.parity import check, make_job, section
from test_user_modules import NOT_OURS

from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.planner.rules.layout_syntax import ranks
from weft.verify.prove import with_layout

TOWERS = {
    "image": {"dim": 16, "layers": 2, "heads": 2, "patch": 4, "ffn": 32},
    "text": {"dim": 12, "layers": 2, "heads": 2, "ffn": 24},
}


def clip(frozen: tuple[str, ...] = (), **train: Any) -> Job:
    model = {**NOT_OURS, "family": "clip", "dim": 8, "vocab": 32, "towers": TOWERS, "frozen": frozen}
    data = {"source": "synthetic", "seq_len": 6, "images": {"size": 8}}
    return make_job(model=model, data=data, train={"accumulation": "auto", **train})


def test_two_towers_are_the_same_run_in_every_layout(pool: RankPool) -> None:
    check(pool, clip(), ("dp_replicate 2", "dp_shard 2 zero=3", "tp 2", "pp 2 gpipe"))


def test_retrieval_does_not_depend_on_the_layout(pool: RankPool) -> None:
    job = clip(metrics=["recall_at_1", "zero_shot"], eval_batches=3)
    one, split = (
        pool.run(on_ranks.evaluated, ranks(section(layout)), with_layout(job, section(layout)))[0]
        for layout in ("1", "dp_shard 2 zero=3")
    )
    assert split == pytest.approx(one, rel=1e-5)
    assert {"val_recall_at_1", "val_recall_at_1_image", "val_recall_at_1_text", "val_zero_shot"} <= one.keys()
