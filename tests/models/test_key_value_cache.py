"""Generation with a cache computes the logits of the whole sequence."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from weft.job.load import parse_job
from weft.job.shapes import resolve
from weft.models.build_model import build_model
from weft.models.key_value_cache import KeyValueCache
from weft.training.generate import NextLogits, whole_logits

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "tied": False},
    "grouped queries and a window": {"kv_heads": 2, "window": 3, "window_layers": [1]},
    "latent attention": {"head_dim": 12, "rope_dim": 4, "latent": {"q_rank": 8, "kv_rank": 6, "v_dim": 8}},
    "sinks and a window": {"kv_heads": 2, "window": 3, "window_layers": [1], "sinks": True},
    "experts": {"experts": {"count": 4, "top_k": 2, "capacity": 0.5}},
}


def make(model: dict[str, Any]) -> torch.nn.Module:
    fields = {"family": "llama", "dim": 32, "layers": 2, "heads": 4, "vocab": 50, "max_len": 12, **model}
    job = resolve(parse_job({"model": fields, "data": {"source": "synthetic", "seq_len": 12}}))
    module = build_model(job.model, 0)
    for name, parameter in [*module.named_parameters()]:
        owner, _, leaf = name.rpartition(".")
        tensor = torch.nn.Parameter(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
        setattr(module.get_submodule(owner), leaf, tensor)
    return module.eval()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_cached_logits_equal_those_of_whole_sequences(name: str) -> None:
    """Rows of different lengths, of which one ends early; later all are longer than the window."""
    model, window = make(MODELS[name]), 12
    uncached = deepcopy(model)
    texts = {0: [1, 2, 3], 1: [4, 5, 6, 7, 8, 9], 2: [10]}
    with NextLogits(model, window) as next_logits:
        for step in range(10):
            rows = [ids[-window:] for ids in texts.values()]
            found = next_logits(texts)
            torch.testing.assert_close(found, whole_logits(uncached, rows, max(map(len, rows))), rtol=1e-4, atol=1e-5)
            assert next_logits.cache is not None and next_logits.cache.length == min(6 + step, window)
            for ids, scores in zip(texts.values(), found, strict=True):
                ids.append(int(scores.argmax()))
            if step == 4:
                del texts[0]
    [stored, *_] = next_logits.cache.stored.values()
    assert stored[0].shape[-1] == (6 if name == "latent attention" else 8), "latent vectors are stored, not keys"


def test_where_earlier_tokens_change_there_is_no_cache() -> None:
    assert KeyValueCache.applies_to(make({}))
    assert not KeyValueCache.applies_to(make({"causal": False}))
    assert not KeyValueCache.applies_to(torch.nn.Linear(1, 1))
    factors = {"short_factors": [1.0] * 4, "long_factors": [2.0] * 4, "original_len": 8, "factor": 2.0}
    assert not KeyValueCache.applies_to(make({"rope_scaling": {"kind": "longrope", **factors}}))
