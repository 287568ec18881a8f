"""fp8 is one run in every layout, and layers that are left out stay in bf16."""

from __future__ import annotations

from typing import Any

import pytest
from parity import differences, make_job, run

from weft.launch.pool import RankPool

WIDE: dict[str, Any] = {"dim": 64, "ffn": 128, "heads": 4, "kv_heads": 4, "head_dim": 16, "layers": 2}
LAYOUTS = (
    "dp_replicate 2", "dp_shard 2 zero=1", "dp_shard 2 zero=2", "dp_shard 2 zero=3", "tp 2",
    "dp_shard 2 zero=3 × tp 2 no-sequence", "dp_replicate 2 × dp_shard 2 zero=3", "pp 2 zbv", "pp 2 × tp 2",
)  # fmt: skip
RECIPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tensorwise": ({}, LAYOUTS),
    "rowwise": ({"scaling": "rowwise"}, LAYOUTS[5:7]),
    "delayed, and a block left out": (
        {"amax": "delayed", "history": 2, "skip": ["blocks.0.*", "*.down"]},
        ("dp_shard 2 zero=3 × tp 2", "pp 2"),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_layout_is_the_same_run(pool: RankPool, name: str) -> None:
    fp8, layouts = RECIPES[name]
    job = make_job(model=WIDE, data={"seq_len": 16}, fp8=fp8, precision="fp8")
    reference = run(pool, job, "1", 3)
    wrong = {x: found for x in layouts if (found := differences(reference, run(pool, job, x, 3), "fp8"))}
    assert not wrong
