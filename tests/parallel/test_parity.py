"""Every layout is the same run as one process: loss, gradients, norm, weights, whatever the model and the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.parity import ONE_PASS, check, make_job

from weft.launch.rank_pool import RankPool

ALL = (
    "dp_replicate 2", "dp_replicate 4", "dp_shard 2 zero=1", "dp_shard 2 zero=2", "dp_shard 2 zero=3",
    "dp_shard 4 zero=1", "dp_shard 4 zero=2", "dp_shard 4 zero=3",
    "tp 2", "tp 4", "tp 2 no-sequence", "tp 4 no-sequence",
    "dp_shard 2 zero=1 × tp 2", "dp_shard 2 zero=2 × tp 2", "dp_shard 2 zero=3 × tp 2", "dp_replicate 2 × tp 2",
    "dp_replicate 2 × dp_shard 2 zero=1", "dp_replicate 2 × dp_shard 2 zero=2", "dp_replicate 2 × dp_shard 2 zero=3",
)  # fmt: skip
SOME = ("dp_shard 2 zero=3 × tp 2", "dp_replicate 2 × tp 2 no-sequence", "tp 2", "dp_replicate 2 × dp_shard 2 zero=2")


def test_every_layout(pool: RankPool) -> None:
    check(pool, make_job("train.ema=0.5"), ALL, steps=2)


def test_a_wide_layer_has_the_same_norm(pool: RankPool) -> None:
    """If 4 million squares were added up in fp32, the norm of one process would be smaller than that of two shards."""
    wide = {"family": "mlp", "dim": 2048, "layers": 1, **dict.fromkeys(("heads", "kv_heads", "ffn", "vocab"))}
    check(pool, make_job(ONE_PASS, model=wide), ("tp 2", "dp_shard 2 zero=3"))


MODELS: dict[str, dict[str, Any]] = {
    "grouped queries, tied, qk-norm, uneven vocabulary": {
        "model": {"kv_heads": 2, "tied": True, "qk_norm": True, "vocab": 51},
    },
    "uneven vocabulary, odd sequence, recompute": {
        "model": {"vocab": 51, "kv_heads": 2}, "data": {"seq_len": 7}, "memory": {"recompute": "full"},
    },
    "gpt2 with dropout and label smoothing, recomputed": {
        "model": {"family": "gpt2", "dropout": 0.2}, "train": {"label_smoothing": 0.1}, "memory": {"recompute": "full"},
    },
    "wide heads, layer norm on rope": {"model": {"head_dim": 6, "norm": "layernorm", "bias": True, "dim": 20}},
    "stretched rope": {"model": {"rope_scaling": {"kind": "llama3", "original_len": 8}}},
    "vit": {"model": {"family": "vit", "vocab": 5, "kv_heads": 4, "patch": 5, "channels": 1}},
    "mlp": {"model": {"family": "mlp", "dim": 12, "layers": 5, **dict.fromkeys(("heads", "kv_heads", "ffn", "vocab"))}},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(pool: RankPool, name: str) -> None:
    check(pool, make_job(ONE_PASS, **MODELS[name]), SOME[:2])


@pytest.mark.parametrize(
    ("family", "layouts"), [("llama", (*SOME[:2], "dp_replicate 4")), ("gpt2", (*SOME[2:], "dp_shard 4 zero=1"))]
)
def test_masked_documents(pool: RankPool, documents: Path, family: str, layouts: tuple[str, ...]) -> None:
    """Ranks hold different counts of valid targets, and one sequence in eight may hold none at all."""
    data = {"source": str(documents), "mask_documents": True, "seq_len": 6}
    job = make_job(data=data, model={"family": family, "vocab": 256})
    check(pool, job, layouts)


@pytest.mark.parametrize(("precision", "layouts"), [("bf16", ALL[::4]), ("fp16", ALL[2::4])])
def test_low_precision(pool: RankPool, precision: str, layouts: tuple[str, ...]) -> None:
    check(pool, make_job(precision=precision), layouts)
