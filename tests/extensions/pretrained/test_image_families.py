"""ViT computes what transformers computes, in one process and under parallel layouts, and goes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import parity
from helpers.published import ENCODERS, save_random, transformers
from safetensors.torch import load_file
from torch import Tensor

import weft
from weft.data.loader import Loader
from weft.data.open_dataset import open_dataset
from weft.extensions.pretrained.interchange.import_run import import_run
from weft.extensions.pretrained.reader import PretrainedWeights
from weft.job import parse_job
from weft.job.errors import JobError
from weft.job.shapes import resolve
from weft.launch.rank_pool import RankPool
from weft.training.export import ExportOptions, export_run, newest


def images_for(config: Any, count: int = 2) -> Tensor:
    size = config.image_size if isinstance(config.image_size, list | tuple) else [config.image_size] * 2
    return torch.randn(count, config.num_channels, *size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def output(model: Any, images: Tensor) -> Tensor:
    out = model(images)
    found: Tensor = out.logits if "logits" in out else out.last_hidden_state
    return found


@pytest.mark.parametrize("name", [name for name in ENCODERS if name.startswith("vit")])
def test_logits_and_round_trip(name: str, tmp_path: Path) -> None:
    """from_hf gives the logits or hidden states of transformers; import and export give the same files."""
    model = save_random(name, tmp_path / "published", shard="20KB")
    images, bare = images_for(model.config), name == "vit without head"
    expected = output(model, images)
    with torch.no_grad():
        ours = weft.from_hf(str(tmp_path / "published"))
        assert (ours(images, features=bare) - expected).abs().max() < 1e-5
        assert ours(images).shape == (2, 7)
        with pytest.raises(ValueError, match=r"images of shape .* were given; the model takes \[batch, "):
            ours(images[..., 1:])
    run, _, _ = import_run(str(tmp_path / "published"), "imported", str(tmp_path / "runs"))
    export_run(run, newest(run), "hf", tmp_path / "exported", ExportOptions(shard_bytes=50_000))
    published, exported = tensors_in(tmp_path / "published"), tensors_in(tmp_path / "exported")
    if bare:  # it has become a classifier with an initial head, and has no pooler
        published = {f"vit.{n}": t for n, t in published.items() if not n.startswith("pooler.")}
        assert exported.keys() - published.keys() == {"classifier.weight", "classifier.bias"}
    assert published.keys() <= exported.keys() and all(torch.equal(exported[n], t) for n, t in published.items())
    (run.path / "pretrained" / "config.json").unlink()  # then one is written from the fields
    export_run(run, newest(run), "hf", tmp_path / "again", ExportOptions())
    for folder in ("exported", "again"):
        kind = transformers.ViTModel if bare else transformers.ViTForImageClassification
        assert torch.equal(output(kind.from_pretrained(tmp_path / folder), images), expected)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}


def test_training_under_layouts(tmp_path: Path, pool: RankPool) -> None:
    """Two steps from published weights: the losses of transformers, in one process and in layouts."""
    model = save_random("vit", tmp_path)
    raw: dict[str, Any] = {
        "model": f"hf:{tmp_path}", "data": {"source": "synthetic"},
        "train": {"global_batch": 4, "accumulation": 2, "steps": 3},
        "optim": {"name": "sgd", "lr": 0.1, "warmup": 0, "schedule": "constant", "clip": 1e9, "weight_decay": 0,
                  "momentum": 0},
    }  # fmt: skip
    job = parse_job(raw)
    assert resolve(job).data.seq_len == 10, "nine patches and the class token"
    reference = parity.run(pool, job, "1")
    resolved, losses = resolve(job), reference.result.trace.losses
    loader = Loader(
        open_dataset(resolved), seed=job.train.seed, global_batch=4, microbatch=4, dp_rank=0, dp_size=1, prefetch=0
    )
    batch = next(iter(loader))[0]
    images = torch.nn.functional.fold(batch["inputs"][:, 1:].transpose(1, 2), 12, 4, stride=4)
    assert abs(losses[0] - model(images, labels=batch["targets"]).loss.item()) < 1e-5
    for layout in ("dp_shard 2 zero=3 × cp 2", "pp 2 × tp 2", "tp 2"):
        assert not parity.differences(reference, parity.run(pool, job, layout)), layout


def test_new_labels(tmp_path: Path) -> None:
    """model.classes replaces the head, whose values are initial ones."""
    save_random("vit", tmp_path)
    job = resolve(parse_job({"model": {"pretrained": str(tmp_path), "classes": 3}, "data": {"source": "synthetic"}}))
    weights = PretrainedWeights(str(tmp_path), job.model)
    assert weights.fresh == {"head.weight", "head.bias"} and job.model.vocab == 3
    assert weights.load("head.weight", torch.float32).shape == (3, 32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "dinov2"}, "has no vocab_size, by which Weft plans a model of model_type=dinov2"),
        ({"model_type": "deit"}, "has no vocab_size, by which Weft plans a model of model_type=deit"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, "Weft reads ViTForImageClassification or ViTModel"),
        ({"patch_size": [4, 2]}, r"patch_size=\[4, 2\]; Weft needs square patches"),
        ({"hidden_act": "mish"}, "hidden_act='mish'; Weft needs gelu"),
        ({"image_size": 3}, "image_size=3, which is smaller than patch_size=4"),
        ({"image_size": [1, 2, 3]}, r"image_size=\[1, 2, 3\]"),
        ({"image_size": 16}, r"position_embeddings as \[1, 10, 32\], and its config asks for \[1, 17, 32\]"),
        ({"use_swiglu_ffn": True}, "use_swiglu_ffn=True, which Weft does not support"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    save_random("vit", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(JobError, match=text):
        weft.from_hf(str(tmp_path))
