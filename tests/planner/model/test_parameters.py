"""Every weight by name and shape, without torch, is every weight of the model that torch builds."""

from __future__ import annotations

from typing import Any

import pytest

from weft.job import parse_job
from weft.models.build_model import build_model
from weft.planner import make_plan
from weft.planner.model.counts import count_parameters
from weft.planner.model.model_facts import model_facts
from weft.planner.model.parameters import coords_of, stage_weights

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 40},
    "normed": {"family": "llama", "dim": 32, "layers": 2, "heads": 4, "ffn": 48, "vocab": 40, "qk_norm": True},
    "gpt2": {"family": "gpt2", "dim": 32, "layers": 3, "heads": 4, "ffn": 64, "vocab": 40},
    "experts": {
        "family": "llama",
        "dim": 32,
        "layers": 3,
        "heads": 4,
        "ffn": 48,
        "vocab": 40,
        "experts": {"count": 4, "top_k": 2, "ffn": 16, "shared": 1, "first_dense": 1},
    },
    "bert": {"family": "bert", "dim": 32, "layers": 2, "heads": 4, "vocab": 40},
    "t5": {"family": "t5", "dim": 32, "layers": 5, "heads": 4, "head_dim": 12, "vocab": 40},
    "t5 untied": {
        "family": "t5",
        "dim": 32,
        "layers": 4,
        "encoder_layers": 1,
        "heads": 4,
        "vocab": 40,
        "tied": False,
        "activation": "geglu",
    },
    "labels": {"family": "bert", "dim": 32, "layers": 2, "heads": 4, "vocab": 40, "classes": 3},
    "vit": {"family": "vit", "dim": 32, "layers": 2, "heads": 4, "ffn": 64, "vocab": 10},
    "class token": {"family": "vit", "dim": 32, "layers": 2, "heads": 4, "ffn": 64, "vocab": 10, "class_token": True},
    "mlp": {"family": "mlp", "dim": 16, "layers": 5},
}


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_the_models(name: str) -> None:
    job, plan = make_plan(parse_job({"model": MODELS[name], "data": {"source": "synthetic", "seq_len": 16}}), 1)
    real = {n: tuple(p.shape) for n, p in build_model(job.model).named_parameters()}
    found = {w.name: w.shape for w in stage_weights(job.model, plan, 0)}
    assert list(found.items()) == list(real.items())
    counts = count_parameters(job.model)
    assert counts is not None and counts.total == sum(p.numel() for p in build_model(job.model).parameters())
    assert round(float(model_facts(job).parameters)) == counts.total


def test_ranks_stand_where_the_mesh_puts_them() -> None:
    raw = {"parallel": {"pp": 2, "dp_shard": 3, "tp": 2}, "train": {"global_batch": 12}, "cluster": {"device": "cpu"}}
    _, plan = make_plan(parse_job({**raw, "model": {**MODELS["llama"], "heads": 4}}), 12)
    assert coords_of(plan, 7) == {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert coords_of(plan, 5) == {"pp": 0, "dp_replicate": 0, "dp_shard": 2, "cp": 0, "tp": 1}
