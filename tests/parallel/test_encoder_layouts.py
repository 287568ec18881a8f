"""Encoders under every axis are the same run as one process."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.parity import check, make_job

from weft.launch.rank_pool import RankPool

MODELS: dict[str, dict[str, Any]] = {
    "masked tokens": {"model": {"family": "bert", "vocab": 49, "dropout": 0.1}},
    "labels": {"model": {"family": "bert", "vocab": 49, "classes": 3}},
    "encoder and decoder": {
        "model": {"family": "t5", "vocab": 49, "layers": 5, "dropout": 0.1},
        "train": {"label_smoothing": 0.1},
    },
    "encoder and decoder, untied": {
        "model": {"family": "t5", "vocab": 49, "layers": 4, "encoder_layers": 3, "tied": False, "activation": "geglu"},
    },
}
LAYOUTS = {
    "masked tokens": ("dp_shard 2 zero=3 × tp 2", "pp 2 × cp 2", "tp 2 no-sequence", "pp 2 zbv"),
    "encoder and decoder": ("dp_shard 2 zero=3 × tp 2", "pp 2 × tp 2", "pp 2 interleaved-1f1b virtual_stages=2"),
    "encoder and decoder, untied": ("pp 4", "tp 2 no-sequence", "dp_replicate 2"),
    "labels": ("tp 2 × cp 2 ulysses", "pp 2 × tp 2", "dp_replicate 2"),
}


@pytest.mark.parametrize("name", MODELS)
def test_layouts(pool: RankPool, name: str) -> None:
    check(pool, make_job(**MODELS[name]), LAYOUTS[name])
