"""Generation with a cache computes the logits of the whole sequence."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from weft.data.tokenizer import ByteTokenizer
from weft.job.load import parse_job
from weft.job.shapes import resolve
from weft.models.build_model import build_model
from weft.models.key_value_cache import KeyValueCache
from weft.training.generate import Sampling, continue_tokens
from weft.training.generation.next_logits import DROPPED_SHARE, NextLogits, whole_logits
from weft.training.generation.shown_text import ShownText

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
    """Rows of different lengths, of which one ends early; others exceed the window and drop their oldest tokens."""
    model, window = make(MODELS[name]), 12
    uncached = deepcopy(model)
    texts = {0: [1, 2, 3], 1: [4, 5, 6, 7, 8, 9], 2: [10]}
    with NextLogits(model, window) as next_logits:
        for step in range(16):
            rows = [ids[next_logits.first_of(len(ids)) :] for ids in texts.values()]
            lengths = [(len(row), len(ids)) for row, ids in zip(rows, texts.values(), strict=True)]
            assert all(row == whole if whole <= window else window - 3 < row <= window for row, whole in lengths)
            found = next_logits(texts)
            torch.testing.assert_close(found, whole_logits(uncached, rows, max(map(len, rows))), rtol=1e-4, atol=1e-5)
            assert next_logits.cache is not None and next_logits.cache.length >= max(map(len, rows))
            for ids, scores in zip(texts.values(), found, strict=True):
                ids.append(int(scores.argmax()))
            if step == 4:
                del texts[0]
    [stored, *_] = next_logits.cache.stored.values()
    assert stored[0].shape[-1] == (6 if name == "latent attention" else 8), "latent vectors are stored, not keys"


def test_a_text_longer_than_the_context_costs_a_few_tokens_each() -> None:
    """The whole window was computed for each token, and the whole text was decoded."""
    model, computed, decoded = make({}), 0, 0

    def count(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal computed
        computed += inputs[0].numel()

    class Counted(ByteTokenizer):
        def decode(self, ids: Iterable[int]) -> str:
            nonlocal decoded
            letters = [97 + i % 26 for i in ids]
            decoded = max(decoded, len(letters))
            return super().decode(letters)

    model.register_forward_pre_hook(count)
    for window in (1, 12):
        computed, decoded = 0, 0
        prompts = [[5], [*range(5, 40)]]
        pieces = list(continue_tokens(model, Counted(), prompts, 1000, Sampling(seed=3), window=window))
        texts = ["".join(piece for i, piece in pieces if i == n) for n in range(2)]
        assert [len(text) for text in texts] == [1000, 1000]
        assert computed < 2 * 1000 * (1 + 2 / DROPPED_SHARE) and decoded < 300
        alone = continue_tokens(model, Counted(), prompts[:1], 1000, Sampling(seed=3), window=window)
        assert "".join(piece for _, piece in alone) == texts[0], "another prompt changed this text"


@pytest.mark.parametrize("stop", [(), ("\u00e9\u00e9ab",)])
def test_texts_are_decoded_in_parts(stop: tuple[str, ...]) -> None:
    """Characters of several tokens and a stop word may be cut where another part begins."""
    tokenizer, random = ByteTokenizer(), np.random.default_rng(0)
    words = "abc" + "".join(random.choice(["a", "b", "\u00e9", "\u20ac", "\U0001f600", " "], 3000)) + "\u00e9\u00e9abc"
    ids = [int(t) for t in tokenizer.encode(words)]
    text, shown = ShownText(ids[:3], tokenizer, torch.Generator()), ""
    for number, token in enumerate(ids[3:], 4):
        text.ids.append(token)
        shown += text.show(stop, last=number == len(ids))
        if text.done:
            break
    whole = words if not stop else words[: words.index(stop[0])]
    assert "abc" + shown == whole


def test_where_earlier_tokens_change_there_is_no_cache() -> None:
    assert KeyValueCache.applies_to(make({}))
    assert not KeyValueCache.applies_to(make({"causal": False}))
    assert not KeyValueCache.applies_to(torch.nn.Linear(1, 1))
    factors = {"short_factors": [1.0] * 4, "long_factors": [2.0] * 4, "original_len": 8, "factor": 2.0}
    assert not KeyValueCache.applies_to(make({"rope_scaling": {"kind": "longrope", **factors}}))
