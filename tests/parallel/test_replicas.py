"""Ranks that hold the same shard have the same bits, even where their sums and products differ in the last bit."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import on_ranks
from helpers.parity import ONE_PASS, disagreements, make_job, section

from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.verify.prove import with_layout

NOT_SET = dict.fromkeys(("heads", "kv_heads", "ffn", "vocab"))
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"bias": True},
    "vit": {"family": "vit", "vocab": 5, "kv_heads": 4},
    "mlp": {"family": "mlp", "dim": 12, "layers": 5, **NOT_SET},
    "experts": {"experts": {"count": 4, "top_k": 2, "ffn": 16}},
}
CASES: list[tuple[str, str, tuple[str, ...]]] = [
    ("llama", "dp_replicate 2", ()),
    ("llama", "dp_replicate 2 × tp 2", ("optim.name=muon",)),
    ("llama", "dp_replicate 4", ("optim.name=muon",)),
    ("llama", "dp_replicate 2 × tp 2 no-sequence", ("optim.name=adafactor",)),
    ("llama", "dp_replicate 2 × dp_shard 2 zero=3", ("optim.name=adafactor",)),
    ("llama", "cp 2 × tp 2", ("optim.name=lamb",)),
    ("llama", "pp 2 × tp 2", ("model.tied=true",)),
    ("llama", "dp_replicate 2", ("comm.compression=powersgd:2", "comm.compression_warmup=0")),
    ("vit", "tp 2", ()),
    ("vit", "tp 2 no-sequence", ()),
    ("mlp", "tp 2", ("optim.name=lars",)),
    ("mlp", "dp_shard 2 zero=2 × tp 2", ("optim.name=sgd",)),
    ("experts", "tp 2", ()),
    ("experts", "dp_replicate 2 × tp 2 × ep 2", ("optim.name=muon",)),
]


@pytest.mark.parametrize(("model", "layout", "overrides"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_replicas_are_equal(pool: RankPool, model: str, layout: str, overrides: tuple[str, ...]) -> None:
    job = with_layout(make_job(ONE_PASS, *overrides, model=MODELS[model]), section(layout))
    seen = pool.run(on_ranks.replicas_with_noise, ranks(section(layout)), make_plan(job), 2)
    assert not disagreements(seen)
    assert len({tuple(each.scales) for each in seen}) == 1, "every rank clips by the same norm"
