"""CLIP computes what transformers computes, trains from its weights, and goes back to the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import parity
from helpers.published import VOCAB, save_random, transformers
from safetensors.torch import load_file
from torch import Tensor

import weft
from weft.data.loader import Loader
from weft.data.open_dataset import open_dataset
from weft.extensions.pretrained.interchange.import_run import import_run
from weft.job import parse_job
from weft.job.errors import JobError
from weft.job.shapes import resolve
from weft.launch.rank_pool import RankPool
from weft.training.export import ExportOptions, export_run, newest

RANDOM = torch.Generator().manual_seed(1)
TEXTS = torch.randint(8, VOCAB, (5, 12), generator=RANDOM)
TEXTS[torch.arange(5), torch.tensor([3, 11, 0, 7, 7])] = 7  # the end token of one of the models
TEXTS[3, 9] = 7


@torch.no_grad()
def similarities(model: Any, images: Tensor) -> Tensor:
    found: Tensor = model(input_ids=TEXTS, pixel_values=images).logits_per_image
    return found


def images_for(config: Any) -> Tensor:
    side, channels = config.vision_config.image_size, config.vision_config.num_channels
    return torch.randn(3, channels, side, side, generator=torch.Generator().manual_seed(2))


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}


@pytest.mark.parametrize("name", ["clip", "clip with odd sizes"])
def test_logits_and_round_trip(name: str, tmp_path: Path) -> None:
    model = save_random(name, tmp_path / "published", shard="20KB")
    images = images_for(model.config)
    expected = similarities(model, images)
    with torch.no_grad():
        found = weft.from_hf(str(tmp_path / "published")).logits(images, TEXTS)  # type: ignore[operator]
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    run, _, _ = import_run(str(tmp_path / "published"), "imported", str(tmp_path / "runs"))
    export_run(run, newest(run), "hf", tmp_path / "exported", ExportOptions(shard_bytes=50_000))
    (run.path / "pretrained" / "config.json").unlink()  # then one is written from the fields
    export_run(run, newest(run), "hf", tmp_path / "again", ExportOptions())
    published = tensors_in(tmp_path / "published")
    for folder in ("exported", "again"):
        exported = tensors_in(tmp_path / folder)
        assert exported.keys() == published.keys()
        assert all(torch.equal(exported[n], t) for n, t in published.items())
        assert torch.equal(similarities(transformers.CLIPModel.from_pretrained(tmp_path / folder), images), expected)


def test_training_under_layouts(tmp_path: Path, pool: RankPool) -> None:
    """The contrastive loss of transformers in the first step, and the same run in layouts."""
    model = save_random("clip", tmp_path)
    raw: dict[str, Any] = {
        "model": f"hf:{tmp_path}", "data": {"source": "synthetic"}, "train": {"global_batch": 4, "steps": 3},
        "optim": {"name": "sgd", "lr": 0.1, "warmup": 0, "schedule": "constant", "clip": 1e9, "momentum": 0},
    }  # fmt: skip
    job = parse_job(raw)
    assert resolve(job).data.seq_len == 12
    reference = parity.run(pool, job, "1")
    loader = Loader(
        open_dataset(resolve(job)), seed=job.train.seed, global_batch=4, microbatch=4, dp_rank=0, dp_size=1, prefetch=0
    )
    batch = next(iter(loader))[0]
    with torch.no_grad():
        loss = model(input_ids=batch["inputs/text"], pixel_values=batch["inputs/image"], return_loss=True).loss
    assert abs(reference.result.trace.losses[0] - loss.item()) < 1e-5
    for layout in ("dp_shard 2 zero=3", "tp 2", "pp 2 gpipe"):
        assert not parity.differences(reference, parity.run(pool, job, layout)), layout


@pytest.mark.parametrize(
    ("section", "key", "value", "text"),
    [
        (None, "architectures", ["CLIPTextModel"], "Weft reads CLIPModel"),
        ("vision_config", "hidden_act", "relu", "vision_config has hidden_act='relu'; Weft needs .* the same in both"),
        ("vision_config", "image_size", [12, 8], r"image_size=\[12, 8\].*images are square"),
        ("text_config", "num_attention_heads", 5, "hidden_size=32; Weft needs a multiple of num_attention_heads=5"),
        ("text_config", "eos_token_id", [1, 2], r"text_config has eos_token_id=\[1, 2\]"),
        ("text_config", "rotary", True, "text_config has rotary=True, which Weft does not support"),
        ("text_config", "num_hidden_layers", 3, "has no tensor text_model.encoder.layers.2"),
    ],
)
def test_what_is_not_supported_is_named(section: str | None, key: str, value: Any, text: str, tmp_path: Path) -> None:
    save_random("clip", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (config if section is None else config[section])[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(JobError, match=text):
        weft.from_hf(str(tmp_path))
