"""Keys that a config leaves out have the defaults of its model type in transformers; null is a value."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from helpers.config_fuzz import DELETED, Base, Edit, edits, outcome, saved
from helpers.published import transformers

from weft.extensions.pretrained import config_defaults
from weft.extensions.pretrained.config import read_fields
from weft.extensions.pretrained.config_defaults import MODULES, TABLE, defaults_of, installed_defaults, table_text
from weft.job.errors import JobError

KINDS = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "make_config_defaults.py"))["KINDS"]
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 53}


def test_table_is_that_of_the_installed_transformers() -> None:
    assert TABLE.read_text(encoding="utf-8") == table_text(KINDS), "run python docs/make_config_defaults.py"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_parsed_defaults_are_those_of_the_class(kind: str) -> None:
    """Every field of the config class whose default is a value."""
    module = MODULES.get(kind, kind)
    classes = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    cls: Any = next(c for c in vars(classes).values() if getattr(c, "model_type", None) == kind)
    inherited = {field.name for field in fields(transformers.PreTrainedConfig)}
    declared = {field.name: field.default for field in fields(cls)}
    parsed = {key: entry.value for key, entry in installed_defaults(kind).items() if key != "default_theta"}
    assert parsed == {key: value for key, value in declared.items() if key in parsed}
    left_out = {key for key, value in declared.items() if isinstance(value, VALUES)} - inherited - parsed.keys()
    assert left_out <= {"initializer_range"}  # which a call makes


VALUES = (int, float, str, bool, type(None))


def test_without_transformers_the_table_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = {kind: dict(defaults_of(kind)) for kind in KINDS}
    monkeypatch.setattr(config_defaults, "_installed_folder", lambda: None)
    defaults_of.cache_clear()
    try:
        assert {kind: dict(defaults_of(kind)) for kind in KINDS} == parsed
    finally:
        defaults_of.cache_clear()


def test_classes_of_older_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before transformers 5, defaults were those of the arguments of __init__; the types are those of the table."""
    folder = tmp_path / "models" / "mixtral"
    folder.mkdir(parents=True)
    (folder / "configuration_mixtral.py").write_text(
        "class MixtralConfig(PretrainedConfig):\n    model_type = 'mixtral'\n"
        "    def __init__(self, vocab_size=7, max_position_embeddings=4096 * 2, head_dim=None, rope_theta=1e6):\n"
        "        raise AssertionError('it is not run')\n"
    )
    monkeypatch.setattr(config_defaults, "_installed_folder", lambda: tmp_path)
    defaults_of.cache_clear()
    try:
        found = defaults_of("mixtral")
        assert (found["vocab_size"].value, found["max_position_embeddings"].value) == (7, 8192)
        assert found["rope_theta"].value == 1e6 and found["num_experts_per_tok"].value == 2
        assert not found["vocab_size"].takes(None) and found["head_dim"].takes(None)
    finally:
        defaults_of.cache_clear()


@pytest.mark.parametrize(("kind", "experts"), [("qwen2_moe", 4), ("qwen3_moe", 8), ("deepseek_v3", 8)])
def test_experts_of_a_token(kind: str, experts: int) -> None:
    """The numbers of experts that Weft once took for 2."""
    config = {"model_type": kind, **SIZES, "num_key_value_heads": 4}
    assert read_fields(config, "config.json")[1]["experts"]["top_k"] == experts


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        ("llama", "rms_norm_eps", None, "has rms_norm_eps=None; Weft needs a number"),
        ("llama", "attention_bias", "no", "has attention_bias='no'; Weft needs true or false"),
        ("qwen2", "max_window_layers", 2.5, "has max_window_layers=2.5; Weft needs a whole number"),
        ("deepseek_v3", "rope_interleave", None, "has rope_interleave=None; Weft needs True"),
        ("deepseek_v3", "head_dim", 3, "has head_dim=3; Weft needs 64"),
        (
            "phi3",
            "rope_scaling",
            {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            "a list of 8 numbers",
        ),
        ("llama", "rope_scaling", {"type": "linear"}, "has rope_scaling factor=None; Weft needs a value"),
        ("t5", "num_decoder_layers", 0, "has num_decoder_layers=0; Weft needs a whole number above 0"),
        ("gemma3_text", "rope_scaling", 1, "has rope_scaling=1; Weft needs an object"),
    ],
)
def test_values_that_transformers_does_not_take(kind: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        read_fields({"model_type": kind, **SIZES, key: value}, "config.json")


SOME = (
    "deepseek_v3", "phi3 with longrope", "gpt_oss without biases", "gpt_neox", "t5 v1.1",
    "llama with every option", "clip",
)  # fmt: skip
"""Models whose configs have the keys that were once read wrongly; bench/config_fuzz.py has all."""
KEYS = {
    "num_experts_per_tok", "norm_topk_prob", "rope_interleave", "head_dim", "max_position_embeddings",
    "rope_parameters", "truncate", "factor", "long_factor", "partial_rotary_factor", "rope_scaling",
    "scale_decoder_outputs",
    "original_max_position_embeddings", "is_encoder_decoder", "is_gated_act", "tie_word_embeddings", "text_config",
}  # fmt: skip


def some(base: Base) -> Iterator[Edit]:
    """Edits of KEYS, and a few others; in the older spelling those of rope_scaling."""
    if base.name.endswith("older spelling"):
        yield from (edit for edit in edits(base.config) if edit[0] == ("rope_scaling",) and edit[1] in (None, {}))
        return
    for number, (path, value) in enumerate(edits(base.config)):
        if (path[-1] in KEYS and (value is DELETED or value in (None, {}, 0))) or number % 199 == 0:
            yield path, value


@pytest.mark.parametrize("name", SOME)
def test_logits_of_changed_configs(name: str, tmp_path: Path) -> None:
    """One key deleted, nulled, changed or added: the logits of transformers, or a refusal of one sentence."""
    for base in saved(name, tmp_path):
        for edit in some(base):
            result = outcome(base, edit)
            assert result in ("equal", "refused") or result.startswith("only weft"), (base.name, edit, result)
