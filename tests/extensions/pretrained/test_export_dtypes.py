"""Each tensor leaves an export in the data type in which it came, whatever the config says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import weft as forked_command
from helpers.config_fuzz import TOKENS
from helpers.published import save_random, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.extensions.pretrained.interchange.import_run import import_run
from weft.job.files.run_folder import RunDir
from weft.training.export import ExportOptions, export_run, newest

Change = Callable[[str], torch.dtype]
MIXED: Change = lambda name: (torch.float32, torch.bfloat16, torch.float16)[len(name) * 7 % 3]  # noqa: E731
CASES: dict[str, tuple[str, Change]] = {
    "fp32 files of a bf16 config": ("llama", lambda name: torch.float32),
    "bf16 with one bias in fp32": (
        "deepseek_v3", lambda name: torch.float32 if "correction_bias" in name else torch.bfloat16,
    ),
    "fp64": ("qwen2", lambda name: torch.float64),
    "mixed experts": ("mixtral", lambda name: torch.float32 if "experts.1." in name else torch.bfloat16),
    "mixed layers of fused tensors": ("phi3", MIXED),
    "mixed parameters of one tensor": ("gpt2", MIXED),
}  # fmt: skip


def published(folder: Path, family: str, change: Change, config_dtype: str | None = "bfloat16") -> dict[str, Tensor]:
    """Save a random model whose tensors have other data types than its config says."""
    save_random(family, folder)
    tensors = {name: t.to(change(name)) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps({**config, **({"dtype": config_dtype} if config_dtype else {})}))
    return tensors


def exported(run: RunDir, folder: Path, options: ExportOptions = ExportOptions()) -> dict[str, Tensor]:
    export_run(run, newest(run), "hf", folder, options)
    return load_file(folder / "model.safetensors")


def check_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_an_import_is_exported_bit_for_bit(case: str, tmp_path: Path) -> None:
    expected = published(tmp_path / "published", *CASES[case])
    run, _, _ = import_run(str(tmp_path / "published"), "imported", str(tmp_path / "runs"))
    check_equal(exported(run, tmp_path / "out"), expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    (run.path / "pretrained" / "tensor_dtypes.json").unlink()  # as earlier versions of Weft imported it
    if case != "mixed experts":  # one parameter in the checkpoint
        check_equal(exported(run, tmp_path / "out"), expected)
    if case.startswith("bf16"):
        models = [
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f, dtype="float32")
            for f in ("published", "out")
        ]
        with torch.no_grad():
            assert torch.equal(*(model(TOKENS).logits for model in models))


@pytest.mark.parametrize("imported", [True, False])
def test_after_training(imported: bool, tmp_path: Path) -> None:
    """A step that changes nothing, from fp32 master weights: of an imported run, and of a job with model: hf:PATH."""
    expected = published(tmp_path / "published", *CASES["bf16 with one bias in fp32"])
    sections: list[str] = ["runs/run/job.yaml"]
    if imported:
        import_run(str(tmp_path / "published"), "run", str(tmp_path / "runs"))
    else:
        (tmp_path / "job.yaml").write_text(f"name: run\nmodel: hf:{tmp_path / 'published'}\n")
        sections = ["job.yaml"]
    words = [
        "train.steps=1", "train.global_batch=2", "optim.lr=1e-30", "optim.weight_decay=0",
        "model.experts.bias_rate=1e-12", "data.source=synthetic", "data.seq_len=8", "data.tokenizer=bytes",
        "cluster.device=cpu",
    ]  # fmt: skip
    done = forked_command(tmp_path, "train", *sections, *words, "--no-resilient", "-n", "1")
    assert done.code == 0, done.err
    run = RunDir(tmp_path / "runs" / "run")
    assert newest(run).step == 1
    check_equal(exported(run, tmp_path / "out"), expected)


def test_without_a_dtype_in_the_config(tmp_path: Path) -> None:
    """The config of the export names the data type that most tensors have; --dtype sets that of all."""
    expected = published(tmp_path / "published", "llama", lambda name: torch.float16, None)
    run, _, _ = import_run(str(tmp_path / "published"), "imported", str(tmp_path / "runs"))
    check_equal(exported(run, tmp_path / "out"), expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    half: Any = exported(run, tmp_path / "half", ExportOptions(dtype=torch.bfloat16))
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
