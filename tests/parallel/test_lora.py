"""Low-rank adapters: every layout trains the same run, and nothing but the adapters."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.parity import check, make_job

from weft.launch.rank_pool import RankPool

LORA: dict[str, Any] = {"lora": {"rank": 3, "alpha": 6, "dropout": 0.1}}


@pytest.mark.parametrize(
    ("precision", "model", "layouts"),
    [
        ("fp32", {}, ["dp2", "zero3=2", "tp2", "tp2 no-sequence", "pp2", "cp2"]),
        ("fp32", {"tied": True, "lora": {"targets": ["q", "o", "down"]}}, ["dp2 tp2", "pp2"]),
        ("fp32", {"experts": {"count": 4, "top_k": 2, "ffn": 16, "shared": 1}}, ["zero3=2 ep2", "tp2"]),
        ("bf16", {"tied": True}, ["zero1=2", "zero3=2 tp2", "pp2 tp2"]),
    ],
    ids=["dense", "tied", "experts", "bf16"],
)
def test_every_layout_trains_the_same_adapters(
    pool: RankPool, precision: str, model: dict[str, Any], layouts: list[str]
) -> None:
    # B starts at zero: with Adam, rounding of its first gradients in bf16 decides the signs of whole updates
    plain = {"name": "sgd", "momentum": 0.0, "lr": 0.1} if precision == "bf16" else {}
    check(pool, make_job(f"precision={precision}", model=LORA | model, optim=plain), layouts)
