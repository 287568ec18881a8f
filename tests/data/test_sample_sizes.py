"""Samples of a user's dataset that a model of Weft's own has no positions, colours or width for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.command import weft, write_job

from weft.data.open_dataset import open_dataset
from weft.job import JobError, parse_job
from weft.job.errors import Exit
from weft.job.load import apply_overrides
from weft.job.shapes import resolve

CODE = """
import numpy as np


class Images:
    train_len, val_len, shape = 8, 0, (3, 224, 224)

    def train(self, index):
        return {"inputs": np.full(self.shape, index / 8, np.float32), "targets": index % 4}

    val = train


class Small(Images):
    shape = (3, 32, 32)


class Grey(Images):
    shape = (1, 28, 28)


class ColoursLast(Images):
    shape = (28, 28, 3)


class Tokens(Images):
    def train(self, index):
        return {"inputs": np.arange(40), "targets": np.arange(40)}


class Labels(Images):
    def train(self, index):
        return {"inputs": np.arange(40), "targets": 1}


class Captions(Images):
    length = 16

    def train(self, index):
        return {"image": np.zeros(self.shape, np.float32), "text": np.arange(self.length)}


class SmallCaptions(Captions):
    shape = (3, 32, 32)


class LongCaptions(SmallCaptions):
    length = 40


class Vectors(Images):
    width, out = 3, 3

    def train(self, index):
        return {"inputs": np.zeros(self.width, np.float32), "targets": np.zeros(self.out, np.float32)}


class OneTarget(Vectors):
    width = 32

    def train(self, index):
        return {"inputs": np.zeros(32, np.float32), "targets": 1.0}
"""

VIT = {"shape": "vit-tiny", "vocab": 4, "patch": 16}
RESNET = {"shape": "resnet-18", "vocab": 4}
CLIP = {"shape": "clip-tiny", "vocab": 64}

CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("Images", VIT, {}, "196 patches, and the model has positions for 128 (model.max_len); give smaller images, or "
     "write data.seq_len=196 and model.max_len=196", "data.seq_len=196 model.max_len=196"),
    ("Tokens", {"shape": "gpt2-tiny"}, {"seq_len": 8}, "40 tokens, and the model has positions for 8 (model.max_len); "
     "cut the samples, or write data.seq_len=40 and model.max_len=40", "data.seq_len=40 model.max_len=40"),
    ("Labels", {"shape": "bert-tiny", "classes": 2}, {"seq_len": 8}, "40 tokens, and the model has positions for 8",
     "data.seq_len=40 model.max_len=40"),
    ("Grey", RESNET, {}, "an image of shape [1, 28, 28], and the model takes [3, height, width]; write "
     "model.channels=1", "model.channels=1"),
    ("ColoursLast", RESNET, {}, "an image of shape [28, 28, 3], and the model takes [3, height, width]; "
     "put the colours first", ""),
    ("Captions", {**CLIP, "image": [32, 32]}, {"seq_len": 16}, "an image of 224 × 224 pixels, and the model takes "
     "32 × 32; resize it, or write model.image=[224,224]", "model.image=[224,224]"),
    ("LongCaptions", {**CLIP, "image": [32, 32]}, {"seq_len": 16}, "a text of shape [40], and the model takes up to 16 "
     "tokens; cut it", ""),
    ("Vectors", {"shape": "mlp-tiny"}, {}, "inputs of shape [3], and the model takes and returns 32 values "
     "(model.dim); write model.dim=3", "model.dim=3"),
    ("OneTarget", {"shape": "mlp-tiny"}, {}, "targets of shape [], and the model takes and returns 32 values "
     "(model.dim); give [32]", ""),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sized.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("name", "model", "data", "said", "works"), CASES, ids=[case[0] for case in CASES])
def test_samples_that_do_not_fit_are_refused(
    folder: Path, name: str, model: dict[str, Any], data: dict[str, Any], said: str, works: str
) -> None:
    def opened(*overrides: str) -> Any:
        job = {"model": model, "data": {"source": f"sized:{name}", **data}}
        return open_dataset(resolve(parse_job(apply_overrides(job, overrides))))

    with pytest.raises(JobError) as caught:
        opened()
    assert str(caught.value).startswith(f"data.source sized:{name}: the {name} it returned gave for train(0) {said}")
    if works:
        assert opened(*works.split()).train_len == 8


@pytest.mark.parametrize(
    ("name", "model"),
    [("Small", VIT), ("Images", {**VIT, "image": [224, 224]}), ("SmallCaptions", {**CLIP, "image": [32, 32]})],
)
def test_samples_that_fit_train(folder: Path, name: str, model: dict[str, Any]) -> None:
    write_job(
        folder, name="fits", model=model, data={"source": f"sized:{name}"}, cluster={"device": "cpu"},
        train={"global_batch": 2, "steps": 1, "eval_every": 0},
    )  # fmt: skip
    done = weft(folder, "train", "job.yaml", "--nproc", "1")
    assert done.code == 0, done.err


def test_the_refusal_ends_a_run_before_it_starts(folder: Path) -> None:
    write_job(folder, name="fits", model=VIT, data={"source": "sized:Images"}, cluster={"device": "cpu"})
    done = weft(folder, "train", "job.yaml", "--nproc", "1")
    assert done.code == Exit.JOB
    assert "196 patches, and the model has positions for 128" in done.last
    assert not (folder / "runs" / "fits" / "checkpoints").exists()
