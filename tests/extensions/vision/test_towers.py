"""A model with an image and a text tower is the same run in every layout, with the same metrics."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import on_ranks
from helpers.parity import NOT_OURS, check, make_job, section

from weft.job.errors import JobError
from weft.job.schema import Job
from weft.job.shapes import resolve
from weft.launch.rank_pool import RankPool
from weft.models.build_model import build_model
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.verify.prove import prove, with_layout

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


APART = "image:ranks=0-2 text:ranks=3"


def test_towers_with_layouts_of_their_own_are_the_same_run(pool: RankPool) -> None:
    layouts = ["image:tp2 text:shard2", APART, "image:shard2+tp2 text:ranks=1-2+shard2"]
    found = prove(clip(), layouts, steps=1, pool=pool)
    assert [(v.verdict, v.why) for v in found] == [("same", None)] * 3


def test_a_frozen_tower_has_no_gradients(pool: RankPool) -> None:
    (found,) = prove(clip(("image",)), [APART], steps=1, pool=pool)
    assert (found.verdict, found.why) == ("same", None)
    assert not [name for name in found.grad_diff_by_parameter if name.startswith("image.")]
    costs = {row["name"]: row for row in make_plan(clip(("image",)))[1].tower_costs}
    trained = {row["name"]: row for row in make_plan(clip())[1].tower_costs}
    assert costs["image"]["states_gib"] == pytest.approx(4 * costs["image"]["parameters"] / 2**30)
    assert costs["image"]["memory_gib"] < trained["image"]["memory_gib"]
    assert costs["text"] == trained["text"]
    for name, module in build_model(resolve(clip()).model).named_children():
        assert trained[name]["parameters"] == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("towers", "message"),
    [
        ({"video": {"tp": 2}}, "names video, and the model has image, text"),
        ({"image": {"tp": 4}}, r"image.tp=4 does not divide its heads=2; tp=1 or 2 would work"),
        ({"image": {"tp": 3}}, r"towers.image asks for tp 3 = 3 ranks, and has 4; a product of 2 would work"),
        ({"image": {"ranks": "2-5"}}, r"image.ranks=2-5 goes beyond the 4 ranks there are"),
        ({"image": {"ranks": "2-1"}}, r"must be a rank or a range of ranks such as 0-2, not '2-1'"),
        ({"image": {"dp_shard": -1, "tp": -1}}, "dp_shard and tp are both -1"),
    ],
)
def test_wrong_layouts_of_towers_are_refused(towers: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        make_plan(with_layout(clip(), {"dp_replicate": 4, "dp_shard": 1, "towers": towers}))


def test_settings_that_towers_do_not_support_are_refused() -> None:
    towers = {"image": {"tp": 2}}
    for section_, message in (
        ({"dp_replicate": 1, "dp_shard": 1, "tp": 2}, "towers and parallel.tp=2.*give each tower its tp"),
        ({"dp_replicate": 1, "dp_shard": 1, "pp": 2}, "towers and parallel.pp=2.*pp=1 would work"),
    ):
        with pytest.raises(JobError, match=message):
            make_plan(with_layout(clip(), {**section_, "towers": towers}))
    with pytest.raises(JobError, match=r"model.family=llama has one layout"):
        make_plan(with_layout(make_job(), {"dp_replicate": 2, "dp_shard": 1, "towers": towers}))
    with pytest.raises(JobError, match=r"accuracy compares outputs with targets.*recall_at_1 and zero_shot"):
        make_plan(with_layout(clip(metrics=["accuracy"]), {"dp_replicate": 2, "dp_shard": 1}))
    with pytest.raises(JobError, match="zero_shot compares the vectors of two towers"):
        make_plan(with_layout(make_job(train={"metrics": ["zero_shot"]}), {"dp_replicate": 2, "dp_shard": 1}))


def test_retrieval_does_not_depend_on_the_layout(pool: RankPool) -> None:
    job = clip(metrics=["recall_at_1", "zero_shot"], eval_batches=3)
    one, split = (
        pool.run(on_ranks.evaluated, ranks(section(layout)), make_plan(with_layout(job, section(layout))))[0]
        for layout in ("1", APART)
    )
    assert split == pytest.approx(one, rel=1e-5)
    assert {"val_recall_at_1", "val_recall_at_1_image", "val_recall_at_1_text", "val_zero_shot"} <= one.keys()
