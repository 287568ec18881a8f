"""A head in the files of a model whose config ties it: its own if its values differ from the embedding, as in
transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.config_fuzz import TOKENS, Base, logits
from helpers.published import CONFIGS, ENCODERS, SIZES, save_config, save_random, transformers
from safetensors.torch import load_file, save_file

import weft
from weft.extensions.pretrained.config import model_fields
from weft.extensions.pretrained.interchange.import_run import import_run
from weft.job.errors import JobError
from weft.training.export import ExportOptions, export_run, newest

HEADS = {
    "gpt_neox": ("embed_out.weight", "gpt_neox.embed_in.weight"),
    "gpt2": ("lm_head.weight", "transformer.wte.weight"),
    "bert": ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    "t5": ("lm_head.weight", "shared.weight"),
}
"""Names of the head and the embedding, where they are not those of Llama."""
NAMES = [name for name in (*CONFIGS, "bert", "t5", "t5 v1.1") if " with" not in name]


def with_head(folder: Path, kind: str, equal: bool = False) -> str:
    """Tie the model of a folder by its config, and add a head to its files; returns the name of the head."""
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(path)
    head, embedding = HEADS.get(kind, ("lm_head.weight", "model.embed_tokens.weight"))
    tensors[head] = tensors[embedding].clone()
    if not equal:
        tensors[head][3, 4] += 1.0
        tensors[head] += 0.1
    save_file(tensors, path, metadata={"format": "pt"})
    return head


@pytest.mark.parametrize("name", NAMES)
def test_a_head_that_differs_is_its_own(name: str, tmp_path: Path) -> None:
    """Logits are those of transformers; an export has the head, and a config that does not tie it."""
    kind = ENCODERS[name][0] if name in ENCODERS else "AutoModelForCausalLM"
    save_random(name, tmp_path / "published")
    head = with_head(tmp_path / "published", name.split()[0])
    base = Base(name, tmp_path / "published", json.loads((tmp_path / "published" / "config.json").read_text()), kind)
    expected = logits(getattr(transformers, kind).from_pretrained(base.folder), base, ours=False)
    assert (logits(weft.from_hf(str(base.folder)), base, ours=True) - expected).abs().max() < 1e-5
    run, _, _ = import_run(str(base.folder), "imported", str(tmp_path / "runs"))
    export_run(run, newest(run), "hf", tmp_path / "exported", ExportOptions())
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    published, exported = (load_file(tmp_path / f / "model.safetensors") for f in ("published", "exported"))
    assert torch.equal(exported[head], published[head])
    assert {k: v for k, v in base.config.items() if k != "tie_word_embeddings"}.items() <= config.items()
    again = getattr(transformers, kind).from_pretrained(tmp_path / "exported")
    assert torch.equal(logits(again, base, ours=False), expected)
    assert (logits(weft.from_hf(str(tmp_path / "exported")), base, ours=True) - expected).abs().max() < 1e-5


def save_tied(folder: Path) -> Any:
    return save_config(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True), folder)


def split_into_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    listed = {name: f"model-{'head' in name:d}.safetensors" for name in tensors}
    for file in set(listed.values()):
        save_file({n: t for n, t in tensors.items() if listed[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def as_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("change", [lambda folder: None, split_into_shards, as_bin])
@pytest.mark.parametrize("equal", [True, False])
def test_values_decide_whether_the_head_is_tied(change: Any, equal: bool, tmp_path: Path) -> None:
    """An equal head stays tied: of one file, of several, and of .bin files, which hold both names."""
    save_tied(tmp_path)
    with_head(tmp_path, "llama", equal)
    change(tmp_path)
    assert model_fields(str(tmp_path))["tied"] is equal
    assert len(dict(weft.from_hf(str(tmp_path)).named_parameters(remove_duplicate=True))) == 21 - equal


def test_without_weights_the_config_decides(tmp_path: Path) -> None:
    """A plan needs no weights."""
    save_tied(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert model_fields(str(tmp_path))["tied"] is True


def test_a_head_without_an_embedding_is_both(tmp_path: Path) -> None:
    model = save_tied(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        assert (weft.from_hf(str(tmp_path))(TOKENS) - model(TOKENS).logits).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "tensor", "repeated"),
    [
        ("t5", "encoder.embed_tokens.weight", "shared.weight"),
        ("bert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
    ],
)
def test_other_repeated_tensors_must_be_equal(name: str, tensor: str, repeated: str, tmp_path: Path) -> None:
    """transformers would untie them, and Weft has one parameter for both."""
    save_random(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[tensor] = tensors[repeated].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weft.from_hf(str(tmp_path))
    tensors[tensor] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JobError, match=f"holds {tensor} and {repeated} with different values"):
        weft.from_hf(str(tmp_path))
