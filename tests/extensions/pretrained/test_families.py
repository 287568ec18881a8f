"""Every family computes what transformers computes, in one process and under parallel layouts, and goes back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import parity
from helpers.published import CONFIGS, ENCODERS, VOCAB, save_random, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import weft
from weft.data.loader import Loader
from weft.data.open_dataset import open_dataset
from weft.extensions.pretrained.family_entry import PRETRAINED
from weft.extensions.pretrained.interchange.import_run import import_run
from weft.job import parse_job
from weft.job.schema import Job
from weft.job.shapes import resolve
from weft.launch.rank_pool import RankPool
from weft.training.export import ExportOptions, export_run, newest

TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
MIXTURES = {"mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"}


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    found: Tensor = model(TOKENS).logits
    return found


def test_every_family_is_tested() -> None:
    assert {name.split()[0] for name in (*CONFIGS, *ENCODERS)} == set(PRETRAINED.names())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_round_trip(name: str, tmp_path: Path) -> None:
    """from_hf gives the logits of transformers; import and export give the same files, which transformers opens."""
    model = save_random(name, tmp_path / "published", shard="60KB")
    expected = logits_of(model)
    with torch.no_grad():
        assert (weft.from_hf(str(tmp_path / "published"))(TOKENS) - expected).abs().max() < 1e-5
    run, _, _ = import_run(str(tmp_path / "published"), "imported", str(tmp_path / "runs"))
    out = tmp_path / "exported"
    export_run(run, newest(run), "hf", out, ExportOptions(shard_bytes=50_000))
    assert tensors_in(out).keys() == tensors_in(tmp_path / "published").keys()
    for key, tensor in tensors_in(tmp_path / "published").items():
        assert torch.equal(tensors_in(out)[key], tensor), key
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits_of(again), expected)


@pytest.mark.parametrize(
    "name", ["llama with every option", "gemma3_text", "phi3 with longrope", "gpt_neox", "qwen2_moe", "deepseek_v2"]
)
def test_config_is_written_from_the_fields(name: str, tmp_path: Path) -> None:
    """A run whose original config is gone is exported with one that transformers reads to the same model."""
    expected = logits_of(save_random(name, tmp_path / "published"))
    run, _, _ = import_run(str(tmp_path / "published"), "imported", str(tmp_path / "runs"))
    (run.path / "pretrained" / "config.json").unlink()
    export_run(run, newest(run), "hf", tmp_path / "exported", ExportOptions())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert (logits_of(again) - expected).abs().max() < 1e-5


def test_fp8_with_scales_of_blocks(tmp_path: Path) -> None:
    """Matrices in fp8 are multiplied by the scales of their blocks, which may be in another file."""
    save_random("deepseek_v3", tmp_path / "published")
    tensors, scales = tensors_in(tmp_path / "published"), {}
    shutil.copytree(tmp_path / "published", tmp_path / "plain")
    plain = dict(tensors)
    for name, tensor in plain.items():
        if tensor.dim() == 2 and name.startswith("model.layers.") and not name.endswith("gate.weight"):
            rows, columns = (-(-size // 8) for size in tensor.shape)
            scale = torch.rand(rows, columns) + 0.5
            whole = scale.repeat_interleave(8, 0)[: len(tensor)].repeat_interleave(8, 1)[:, : tensor.shape[1]]
            tensors[name], scales[f"{name}_scale_inv"] = (tensor / whole).to(torch.float8_e4m3fn), scale
            plain[name] = tensors[name].float() * whole
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "published" / "model.safetensors").unlink()
    listed = {n: f"{kind}.safetensors" for kind, held in (("a", tensors), ("b", scales)) for n in held}
    for kind, held in (("a", tensors), ("b", scales)):
        save_file(held, tmp_path / "published" / f"{kind}.safetensors")
    (tmp_path / "published" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8], "fmt": "e4m3"}
    (tmp_path / "published" / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        found, expected = (weft.from_hf(str(tmp_path / name))(TOKENS) for name in ("published", "plain"))
    assert torch.equal(found, expected)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


def training_job(folder: Path, name: str) -> Job:
    still = {"experts": {"bias_rate": 1e-12}} if name == "deepseek_v3" else {}  # transformers does not move the bias
    raw = {
        "model": {"pretrained": str(folder), **still},
        "data": {"source": "synthetic", "seq_len": 12},
        "train": {"global_batch": 4, "accumulation": 2, "steps": 3},
        "optim": {"name": "sgd", "lr": 0.1, "warmup": 0, "schedule": "constant", "clip": 1e9, "weight_decay": 0,
                  "momentum": 0},
    }  # fmt: skip
    return parse_job(raw)


@pytest.mark.parametrize("name", [name for name in CONFIGS if " " not in name])
def test_training_under_layouts(name: str, tmp_path: Path, pool: RankPool) -> None:
    """Two steps from published weights: the losses and gradients of transformers, in one process and in layouts."""
    model = save_random(name, tmp_path)
    job = training_job(tmp_path, name)
    reference = parity.run(pool, job, "1")
    losses, gradients = train(model, job)
    for ours, theirs in zip(reference.result.trace.losses, losses, strict=True):
        assert abs(ours - theirs) < 1e-5
    total = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    assert abs(reference.result.trace.norms[-1] - total) < 1e-5 * total
    for layout in ("dp_shard 2 zero=3 × tp 2 ep=2", "pp 2 × dp_shard 2 ep=2") if name in MIXTURES else (
        "dp_shard 2 zero=3", "pp 2 × tp 2"
    ):  # fmt: skip
        other = parity.run(pool, job, layout)
        assert not parity.differences(reference, other), layout


def train(model: Any, job: Job) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of two steps of SGD in transformers, and the gradients of the last."""
    job = resolve(job)
    loader = Loader(
        open_dataset(job), seed=job.train.seed, global_batch=job.train.global_batch, microbatch=job.train.global_batch,
        dp_rank=0, dp_size=1, prefetch=0,
    )  # fmt: skip
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _, (batch,) in zip(range(2), loader, strict=False):
        optimizer.zero_grad()
        scores = model(batch["inputs"]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, batch["targets"].flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
