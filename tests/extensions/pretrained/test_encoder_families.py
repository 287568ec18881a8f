"""Encoders compute what transformers computes, and go back to the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.published import VOCAB, save_random, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import weft
from weft.extensions.pretrained.interchange.import_run import import_run
from weft.extensions.pretrained.reader import PretrainedWeights
from weft.job import parse_job
from weft.job.errors import JobError
from weft.job.shapes import resolve
from weft.training.export import ExportOptions, export_run, newest

RANDOM = torch.Generator().manual_seed(1)
TOKENS = torch.randint(0, VOCAB, (2, 12), generator=RANDOM)
TYPES = torch.randint(0, 3, (2, 12), generator=RANDOM)
MASK = (torch.arange(12) < torch.tensor([[12], [7]])).long()


@torch.no_grad()
def bert_output(model: Any) -> Tensor:
    """Logits or hidden states of a model of transformers, without those of padding."""
    out = model(TOKENS, token_type_ids=TYPES, attention_mask=MASK)
    found: Tensor = out.logits if "logits" in out else out.last_hidden_state
    return found[MASK.bool()] if found.dim() == 3 else found


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}


@pytest.mark.parametrize("name", ["bert", "bert without head", "bert-classes"])
def test_bert(name: str, tmp_path: Path) -> None:
    """from_hf gives the outputs of transformers with token types and padding; import and export give the same files."""
    expected = bert_output(save_random(name, tmp_path / "published", shard="20KB"))
    bare = name == "bert without head"
    with torch.no_grad():
        found = weft.from_hf(str(tmp_path / "published"))(TOKENS, types=TYPES, docs=1 - MASK, features=bare)
    found = found[MASK.bool()] if found.dim() == 3 else found
    assert (found - expected).abs().max() < 1e-5
    run, _, _ = import_run(str(tmp_path / "published"), "imported", str(tmp_path / "runs"))
    export_run(run, newest(run), "hf", tmp_path / "exported", ExportOptions(shard_bytes=50_000))
    published, exported = tensors_in(tmp_path / "published"), tensors_in(tmp_path / "exported")
    if bare:  # it has become a masked language model with an initial head, and has no pooler
        published = {f"bert.{n}": t for n, t in published.items() if not n.startswith("pooler.")}
        assert published.keys() < exported.keys()
    else:
        assert published.keys() == exported.keys()
    assert all(torch.equal(exported[n], t) for n, t in published.items())
    (run.path / "pretrained" / "config.json").unlink()  # then one is written from the fields
    export_run(run, newest(run), "hf", tmp_path / "again", ExportOptions())
    kind = transformers.AutoModelForSequenceClassification if "classes" in name else transformers.AutoModelForMaskedLM
    again = kind.from_pretrained(tmp_path / "again")
    if not bare:
        assert (bert_output(again) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["t5", "t5 v1.1", "t5 v1.1 untied"])
def test_t5(name: str, tmp_path: Path) -> None:
    """The same of T5, whose head is tied and scaled, tied, or its own."""
    model = save_random(name.removesuffix(" untied"), tmp_path / "published", shard="20KB")
    if name.endswith("untied"):
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32, generator=RANDOM) * 0.1)
        model.save_pretrained(tmp_path / "published", max_shard_size="20KB")
    answer = TOKENS[:, :9].flip(1)
    with torch.no_grad():
        expected = model(TOKENS, attention_mask=MASK, decoder_input_ids=answer).logits
        found = weft.from_hf(str(tmp_path / "published"))(TOKENS, docs=1 - MASK, decoder_inputs=answer)
    assert (found - expected).abs().max() < 1e-5
    run, _, _ = import_run(str(tmp_path / "published"), "imported", str(tmp_path / "runs"))
    export_run(run, newest(run), "hf", tmp_path / "exported", ExportOptions(shard_bytes=50_000))
    published, exported = tensors_in(tmp_path / "published"), tensors_in(tmp_path / "exported")
    assert published.keys() == exported.keys() and ("lm_head.weight" in published) == name.endswith("untied")
    assert all(torch.equal(exported[n], t) for n, t in published.items())
    (run.path / "pretrained" / "config.json").unlink()
    export_run(run, newest(run), "hf", tmp_path / "again", ExportOptions())
    for folder in ("exported", "again"):
        again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / folder)
        with torch.no_grad():
            assert torch.equal(again(TOKENS, attention_mask=MASK, decoder_input_ids=answer).logits, expected)


def test_new_labels_for_a_masked_language_model(tmp_path: Path) -> None:
    """model.classes replaces the head, whose values are initial ones; names of older files are read."""
    save_random("bert", tmp_path)
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
           for n, t in load_file(tmp_path / "model.safetensors").items()}  # fmt: skip
    save_file(old, tmp_path / "model.safetensors")
    job = resolve(parse_job({"model": {"pretrained": str(tmp_path), "classes": 4}, "data": {"seq_len": 8}}))
    weights = PretrainedWeights(str(tmp_path), job.model)
    assert weights.fresh == {"head.weight", "head.bias", "head.pooler.weight", "head.pooler.bias"}
    assert torch.equal(weights.load("embed_norm.weight", torch.float32), old["bert.embeddings.LayerNorm.gamma"])
    assert 0 < weights.load("head.weight", torch.float32).std() < 0.1


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("is_decoder", True, "is_decoder=True"),
        ("position_embedding_type", "relative_key", "position_embedding_type='relative_key'"),
        ("problem_type", "multi_label_classification", "problem_type='multi_label_classification'"),
        ("embedding_size", 16, "embedding_size=16"),
    ],
)
def test_what_is_not_supported_is_named(key: str, value: Any, text: str, tmp_path: Path) -> None:
    save_random("bert-classes", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(JobError, match=text):
        weft.from_hf(str(tmp_path))
