"""Models under cp are the same run as one process, in every style and with every other axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.parity import check, make_job, run

from weft.launch.rank_pool import RankPool

STYLES = ("cp 2 ring", "cp 2 ulysses", "cp 4 ring", "cp 4 ulysses", "cp 4 hybrid")
BESIDE = (
    "cp 2 ring × tp 2", "cp 2 ulysses × tp 2", "cp 2 × tp 2 no-sequence", "cp 2 × dp_shard 2 zero=3",
    "cp 2 ulysses × dp_shard 2 zero=1", "cp 2 × dp_replicate 2", "cp 2 ring × pp 2", "cp 2 ulysses × pp 2 zb-h1",
)  # fmt: skip


def test_every_style_beside_every_axis(pool: RankPool) -> None:
    """Grouped queries with fewer key heads than ranks, and a length that does not divide."""
    job = make_job("train.ema=0.5", model={"kv_heads": 2}, data={"seq_len": 11})
    check(pool, job, STYLES, steps=2)
    check(pool, job, BESIDE)


MODELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "gpt2 with dropout, label smoothing, tied, recomputed": (
        ("cp 4 hybrid", "cp 2 × pp 2"),
        {
            "model": {"family": "gpt2", "dropout": 0.2, "tied": True}, "train": {"label_smoothing": 0.1},
            "memory": {"recompute": "full"}, "data": {"seq_len": 9},
        },
    ),
    "bidirectional, one key head": (
        ("cp 4 ring", "cp 4 ulysses", "cp 4 hybrid"),
        {"model": {"causal": False, "kv_heads": 1}, "data": {"seq_len": 13}},
    ),
    "vit": (
        ("cp 4 ulysses", "cp 2 × tp 2"),
        {"model": {"family": "vit", "vocab": 5}, "data": {"seq_len": 9}},
    ),
    "latent attention": (
        ("cp 4 ring", "cp 2 ulysses × tp 2", "cp 2 × pp 2"),
        {
            "model": {"head_dim": 12, "rope_dim": 4, "latent": {"q_rank": 8, "kv_rank": 6, "v_dim": 8}},
            "data": {"seq_len": 9},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(pool: RankPool, name: str) -> None:
    layouts, sections = MODELS[name]
    check(pool, make_job(**sections), layouts)


@pytest.mark.parametrize(
    ("offload", "layouts"),
    [("none", ("1", "cp 2 ulysses × tp 2", "pp 2 × cp 2")), ("activations", ("cp 2 ring", "dp_shard 2 zero=3 × tp 2"))],
)
def test_chunks_and_offloaded_activations(
    pool: RankPool, documents: Path, offload: str, layouts: tuple[str, ...]
) -> None:
    """Compared with a run that keeps everything; the host has room for some blocks only."""
    sections: dict[str, Any] = {
        "model": {"family": "gpt2", "dropout": 0.2, "vocab": 256, "layers": 3, "positions": "rope"},
        "data": {"source": str(documents), "mask_documents": offload == "none", "seq_len": 16},
    }
    reference = run(pool, make_job(**sections), "1", 1)
    memory = {"chunk": 3 if offload == "none" else 0, "offload": offload, "host_gib": 3e-5}
    check(pool, make_job(**sections, memory=memory), layouts, 1, reference)


@pytest.mark.parametrize(("family", "layouts"), [("llama", STYLES[::2]), ("gpt2", (*STYLES[1::2], "cp 2 × tp 2"))])
def test_masked_documents(pool: RankPool, documents: Path, family: str, layouts: tuple[str, ...]) -> None:
    data = {"source": str(documents), "mask_documents": True, "seq_len": 22}
    check(pool, make_job(data=data, model={"family": family, "vocab": 256}), layouts)


def test_bf16(pool: RankPool) -> None:
    check(pool, make_job(precision="bf16", model={"kv_heads": 2}), STYLES[2:])
