"""fp8 gives the same run in every layout; skipped layers stay in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import compression_ranks, on_ranks
from helpers.parity import check, differences, make_job, run, section

from weft.job.schema import Job
from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.verify.prove import with_layout

WIDE: dict[str, Any] = {"dim": 64, "ffn": 128, "heads": 4, "kv_heads": 4, "head_dim": 16, "layers": 2, "vocab": 64}
LAYOUTS = (
    "dp_replicate 2", "dp_shard 2 zero=1", "dp_shard 2 zero=2", "dp_shard 2 zero=3", "tp 2",
    "dp_shard 2 zero=3 × tp 2 no-sequence", "dp_replicate 2 × dp_shard 2 zero=3", "pp 2 zbv", "pp 2 × tp 2",
)  # fmt: skip
RECIPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tensorwise": ({"amax": "dynamic", "head": False}, LAYOUTS[::2]),
    "by default": ({}, LAYOUTS[1::2]),
    "rowwise": ({"scaling": "rowwise"}, LAYOUTS[5:7]),
    "dynamic, the head too": ({"amax": "dynamic"}, ("tp 2", "pp 2")),
    "delayed, and a block left out": (
        {"history": 2, "skip": ["blocks.0.*", "*.o"]},
        ("dp_shard 2 zero=3 × tp 2", "pp 2", "dp_replicate 2"),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_layout_is_the_same_run(pool: RankPool, name: str) -> None:
    fp8, layouts = RECIPES[name]
    job = make_job(model=WIDE, data={"seq_len": 16}, fp8=fp8, precision="fp8")
    check(pool, job, layouts, steps=2 if fp8.get("amax") == "dynamic" else 3)


def test_delayed_scales_resume_from_a_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    job = make_job(model=WIDE, data={"seq_len": 16}, precision="fp8", fp8={"history": 3})

    def go(job: Job, layout: str, *args: Any) -> list[Any]:
        spread = section(layout)
        seen = pool.run(compression_ranks.journey, ranks(spread), make_plan(with_layout(job, spread)), *args)
        return [one["bits"] for one in seen]

    for layout in ("dp_shard 2 zero=3", "pp 2"):
        folder = str(tmp_path / layout[:2])
        straight = go(job, layout, 4)
        go(job, layout, 2, folder)
        assert go(job, layout, 2, folder) == straight
    other = make_job(model=WIDE, data={"seq_len": 16}, precision="fp8", fp8={"history": 5})
    assert go(other, "dp_replicate 2", 1, folder)  # maxima over another number of steps are not taken over


NOT_OURS: dict[str, Any] = dict.fromkeys(("family", "dim", "layers", "heads", "kv_heads", "ffn", "vocab"))
OTHERS: dict[str, dict[str, Any]] = {
    "own": {"model": {**NOT_OURS, "module": "helpers.own_models:WithParts", "args": {"dim": 32, "hidden": 64}}},
    "mlp": {"model": {**NOT_OURS, "family": "mlp", "dim": 32, "layers": 5}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models(pool: RankPool, name: str) -> None:
    source = {"source": "pydoc", "seq_len": 8} if name == "own" else {}
    jobs = {p: make_job(**OTHERS[name], data=source, precision=p) for p in ("fp8", "bf16")}
    reference = run(pool, jobs["fp8"], "1")
    assert not differences(reference, run(pool, jobs["fp8"], "dp_shard 2 zero=3 × tp 2"), "fp8")
    wide = run(pool, jobs["bf16"], "1").result.trace
    assert wide.losses != reference.result.trace.losses
    assert wide.losses == pytest.approx(reference.result.trace.losses, rel=0.1)


def test_fp8_skip_of_an_unknown_layer_is_refused(pool: RankPool) -> None:
    job = make_job(model=WIDE, precision="fp8", fp8={"skip": ["blocks.*.ff"]})
    (outcome,) = pool.run(on_ranks.refusal, 1, with_layout(job, section("1")))
    assert (
        outcome == "JobError: fp8.skip names 'blocks.*.ff', which fits no layer; the first layer is 'blocks.0.attn.q'"
    )
