"""Encoders under every axis are the same run as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import on_ranks
from helpers.parity import check, make_job, section

from weft.launch.rank_pool import RankPool
from weft.planner import make_plan
from weft.planner.rules.layout_syntax import ranks
from weft.verify.prove import with_layout

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
    "encoder and decoder": (
        "dp_shard 2 zero=3 × tp 2", "pp 2 × tp 2", "pp 2 interleaved-1f1b virtual_stages=2", "cp 2 ring × tp 2",
        "cp 2 ulysses × pp 2", "cp 4 hybrid",
    ),
    "encoder and decoder, untied": (
        "pp 4", "tp 2 no-sequence", "dp_replicate 2", "cp 2 ring × pp 2 zb-h1", "cp 2 ulysses × tp 2 no-sequence",
        "cp 4 ring", "cp 4 ulysses",
    ),
    "labels": ("tp 2 × cp 2 ulysses", "pp 2 × tp 2", "dp_replicate 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_layouts(pool: RankPool, name: str) -> None:
    check(pool, make_job(**MODELS[name]), LAYOUTS[name])


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, Any]:
    """Pairs of which a batch has sources and targets of other lengths: the ends of some are all padding on one rank."""
    words = ["a", "bb", "c d e", "lengthy sources, then", "x y", "seven words", "of a sentence to be sent", "h"]
    lines = [f"{words[i % 8]}\t{words[(3 * i + i // 8) % 8]} {'abc'[i % 3]}" for i in range(40)]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    return {"source": str(tmp_path / "pairs.tsv"), "format": "pairs", "seq_len": 23, "val_fraction": 0.2}


PAIRS: dict[str, Any] = {"model": {"family": "t5", "vocab": 256, "dropout": 0.1}, "memory": {"recompute": "full"}}


def test_pairs_over_context(pool: RankPool, pairs: dict[str, Any]) -> None:
    """Padded sources and targets, recomputed."""
    layouts = ("cp 4 ring", "cp 4 ulysses", "cp 2 × dp_shard 2 zero=3", "cp 2 ring × dp_replicate 2", "cp 2 × pp 2")
    check(pool, make_job(data=pairs, **PAIRS), layouts)


def test_pairs_over_context_in_bf16(pool: RankPool, pairs: dict[str, Any]) -> None:
    job = make_job(data=pairs, precision="bf16", **PAIRS)
    check(pool, job, ("cp 4 hybrid", "cp 2 ring × dp_shard 2 zero=2", "cp 2 ulysses × tp 2"))


def test_evaluation_over_context(pool: RankPool, pairs: dict[str, Any]) -> None:
    """n-grams and sums span the ranks, also of a decoder whose ranks hold tokens from both ends."""
    train = {"metrics": ["bleu", "accuracy", "perplexity"], "global_batch": 4, "eval_batches": 2}
    decoder = {"data": {"seq_len": 9}, "model": {"vocab": 3}}
    for sections in ({"data": pairs, **PAIRS, "model": {**PAIRS["model"], "vocab": 128}}, decoder):
        job = make_job(train={**train, "accumulation": 1}, **sections)
        found = {}
        for layout in ("1", "cp 2 ring", "cp 4 hybrid"):
            spread = section(layout)
            answers = pool.run(on_ranks.evaluated, ranks(spread), make_plan(with_layout(job, spread)))
            assert all(answer == answers[0] for answer in answers)
            found[layout] = answers[0]
        for name, value in found.pop("1").items():
            assert value and [other[name] for other in found.values()] == pytest.approx([value] * 2, rel=1e-4), name
