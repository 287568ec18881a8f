"""Tensor parallelism over more ranks than there are key and value heads: ranks compute parts of a head."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.parity import ONE_PASS, check, make_job

from weft.launch.rank_pool import RankPool

KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "one head, a norm of each head, tied": (
        {"model": {"kv_heads": 1, "qk_norm": True, "tied": True, "vocab": 51}},
        ("tp 2", "tp 2 no-sequence", "dp_shard 2 zero=3 × tp 2", "tp 2 × pp 2"),
    ),
    "two heads over four ranks, biases": ({"model": {"kv_heads": 2, "bias": True}}, ("tp 4",)),
    "a norm of all heads": ({"model": {"kv_heads": 2, "qk_norm": "all"}}, ("tp 4",)),
    "adapters": ({"model": {"kv_heads": 1, "lora": {"rank": 2}}}, ("tp 2", "tp 4 no-sequence")),
    "parts of the sequence": ({"model": {"kv_heads": 1}}, ("cp 2 × tp 2", "cp 2 ulysses × tp 2")),
    "chunks": ({"model": {"kv_heads": 1}, "memory": {"chunk": 4}}, ("tp 2",)),
    "experts, recomputed": (
        {
            "model": {"kv_heads": 1, "experts": {"count": 4, "top_k": 2, "ffn": 16}}, "memory": {"recompute": "full"},
        },
        ("dp_shard 2 × tp 2 × ep 2",),
    ),
    "fp8": (
        {
            "model": {"dim": 64, "ffn": 128, "kv_heads": 1, "head_dim": 32, "vocab": 64},
            "precision": "fp8",
        },
        ("tp 2",),
    ),
    "encoder and decoder": ({"model": {"family": "t5", "kv_heads": 1, "vocab": 51}}, ("tp 2",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_heads_than_ranks(pool: RankPool, kind: str) -> None:
    sections, layouts = KINDS[kind]
    check(pool, make_job(ONE_PASS, **sections), layouts)
