"""Files of published checkpoints: formats, damage, hostile content, and configs that ask for what Weft lacks."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forked_python import TEMPLATE_ENV, Popen
from safetensors.torch import load_file, save_file

import weft
from weft.cli.main import main
from weft.extensions.pretrained.checkpoint_folder import find_folder
from weft.extensions.pretrained.config import read_fields
from weft.job.errors import JobError

STORIES = Path(__file__).parents[3] / "recipes" / "stories260K"
CONFIG = json.loads((STORIES / "config.json").read_text())
TOKENS = torch.arange(1, 13).unsqueeze(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(STORIES, tmp_path / "published")
    return tmp_path / "published"


def set_key(folder: Path, **keys: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **keys}))


def as_bin(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return tensors


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    found: torch.Tensor = weft.from_hf(str(folder))(TOKENS)  # type: ignore[attr-defined]
    return found


def test_bin_files_shards_and_half_precision(folder: Path) -> None:
    """.bin files of both formats of torch, an index of shards, and bf16 give the same model."""
    expected = logits(folder)
    tensors = as_bin(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    assert torch.equal(logits(folder), expected)
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(logits(folder), expected)
    halves = {n: f"model-{i % 2}.safetensors" for i, n in enumerate(tensors)}
    for file in set(halves.values()):
        save_file({n: t.bfloat16() for n, t in tensors.items() if halves[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": halves}))
    found = logits(folder)
    assert 0 < (found - expected).abs().max() < 0.2


def test_cached_hub_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--someone--stories" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("a" * 40)
    folder.rename(snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert find_folder("someone/stories") == snapshot
    with pytest.raises(JobError, match=r"someone/else is not in the hub cache .*; download it first"):
        find_folder("someone/else")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "mamba"}, "has no tensor backbone.embeddings.weight, which its config asks for"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "has architectures=.*; Weft reads LlamaForCausalLM"),
        ({"hidden_act": "relu"}, "has hidden_act='relu'; Weft needs silu or swish or"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "has rope_scaling type='ntk'; Weft needs default or"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope": [1]}}, r"has rope_scaling mrope=\[1\]"),
        ({"final_logit_softcapping": 30.0}, "has final_logit_softcapping=30.0, which Weft does not support"),
        ({"sliding_window": 128}, "has sliding_window=128, which Weft does not support for this family"),
        ({"quantization_config": {"bits": 4}}, "has quantization_config="),
        ({"hidden_size": "64; import os"}, "has hidden_size='64; import os'; Weft needs a whole number above 0"),
        ({"hidden_size": 10**12}, "has hidden_size=1000000000000; Weft needs"),
        (
            {"num_hidden_layers": 10**8},
            "has num_hidden_layers=100000000; Weft needs a whole number above 0 and at most 10000",
        ),
        ({"hidden_size": 2**19, "vocab_size": 2**26}, "describes a model of .* parameters, and its weights have"),
        ({"head_dim": 16}, r"as \[64, 64\], and its config asks for \[128, 64\]"),
        ({"num_hidden_layers": 6}, "has no tensor model.layers.5"),
        ({"num_hidden_layers": 4}, "holds 'model.layers.4.input_layernorm.weight', which a model of Llama"),
        ({"attention_bias": True}, "has no tensor model.layers.0.self_attn.q_proj.bias"),
        ({"tie_word_embeddings": False}, "has no tensor lm_head.weight"),
    ],
)
def test_configs_that_are_refused(folder: Path, keys: dict[str, Any], message: str) -> None:
    set_key(folder, **keys)
    with pytest.raises(JobError, match=message) as refused:
        weft.from_hf(str(folder))  # type: ignore[attr-defined]
    assert "\n" not in str(refused.value)


def test_null_and_false_keys_are_accepted() -> None:
    read_fields({**CONFIG, "final_logit_softcapping": None, "some_new_switch": False}, "config.json")


def test_null_architectures_are_those_of_the_kind(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": None}))
    assert weft.from_hf(str(folder))  # type: ignore[attr-defined]


class Payload:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch ran-code",)


SIZE = 300_000
"""More bytes than the model has parameters: files that are too small for the config are refused before."""


def pickled(folder: Path) -> None:
    as_bin(folder)
    with (folder / "pytorch_model.bin").open("wb") as stream:
        pickle.dump({"model.norm.weight": Payload(), "padding": bytes(SIZE)}, stream)


def zipped(folder: Path) -> None:
    torch.save({**as_bin(folder), "extra": Payload()}, folder / "pytorch_model.bin")


def numbers(folder: Path) -> None:
    as_bin(folder)
    torch.save([1, 2, 3, torch.zeros(SIZE)], folder / "pytorch_model.bin")


def out_of_range(folder: Path) -> None:
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 10**9]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(SIZE))


def huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + bytes(SIZE))


def integers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(64, dtype=torch.int8)}, folder / "model.safetensors")


def bare_fp8(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")


def strange_name(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "../../etc/passwd": torch.ones(2)}, folder / "model.safetensors")


def index_of(file: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))

    return write


def deep_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (pickled, "pytorch_model.bin is not a file of weights: it names Python code, which is never run"),
        (zipped, "pytorch_model.bin is not a file of weights: it names Python code, which is never run"),
        (numbers, "pytorch_model.bin holds something else than named tensors"),
        (out_of_range, "model.safetensors is not a file of weights"),
        (huge_header, "model.safetensors is not a file of weights"),
        (integers, "holds model.norm.weight as I8; Weft reads fp32, fp16 and bf16"),
        (bare_fp8, "holds model.layers.0.mlp.up_proj.weight in fp8 without the scales of its blocks"),
        (strange_name, "holds '../../etc/passwd', which a model of Llama 2 and 3 does not have"),
        (index_of("../other/model.safetensors"), "names '../other/model.safetensors', which is not a file inside"),
        (index_of("/etc/passwd"), "names '/etc/passwd', which is not a file inside its folder"),
        (index_of("missing.safetensors"), "names missing.safetensors, which is missing"),
        (index_of("model.safetensors"), "which the index does not list for it"),
        (deep_index, "is not JSON: it is nested too deeply"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights; they would be in model.safetensors"),
    ],
)
def test_hostile_and_damaged_files(
    damage: Callable[[Path], None], message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """`weft import` ends with one sentence and exit code 2, runs nothing and leaves nothing behind."""
    damage(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["weft", "import", str(folder), "--name", "imported"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capfd.readouterr().err.strip()
    assert ended.value.code == 2 and message in shown and "\n" not in shown
    assert not (tmp_path / "ran-code").exists() and not (tmp_path / "runs" / "imported").exists()


def test_a_shard_is_read_within_its_memory() -> None:
    """Reading one of eight shards of sparse files takes the memory of that shard and a constant."""
    shape = {"family": "llama", "dim": 512, "layers": 8, "heads": 8, "ffn": 2048, "vocab": 32000}
    command = [sys.executable, str(Path(__file__).parents[3] / "bench" / "import_70b.py"), "--json", "--shape",
               json.dumps(shape), "--dp-shard", "4", "--tp", "2", "--rank", "5", "--file-bytes", "5e7"]  # fmt: skip
    process = Popen(command, env=TEMPLATE_ENV, stdout=subprocess.PIPE, text=True)
    found = json.loads(process.communicate()[0].splitlines()[-1])
    assert found["files_gb"] > 0.12 and 30 < found["shard_mib"] < 40
    assert found["over_shard_mib"] < 64, "the other shards have seven times as much"
