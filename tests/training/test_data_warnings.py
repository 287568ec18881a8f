"""What a run says about data that its settings do not fit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.dataset import Sample
from weft.job.load import parse_job
from weft.job.schema import Job
from weft.training.data_warnings import data_warnings


@dataclass
class Samples:
    train_len: int = 1000
    val_len: int = 10

    def train(self, index: int) -> Sample:
        return {}

    def val(self, index: int) -> Sample:
        return {}


FEW = Samples(train_len=5, val_len=0)


def warnings(dataset: Samples, **sections: Any) -> list[str]:
    job = parse_job({"model": {"shape": "tiny"}, "data": {"source": "synthetic"}, **sections})
    return list(data_warnings(job, dataset))


def test_nothing_is_said_about_data_that_fits() -> None:
    assert warnings(Samples()) == []
    assert warnings(FEW, train={"eval_every": 0, "global_batch": 5}) == []


def test_an_evaluation_without_samples() -> None:
    assert warnings(FEW, train={"eval_every": 7, "global_batch": 4}) == [
        "data.source synthetic has no validation part, so train.eval_every=7 evaluates nothing; "
        "write data.val_fraction=0.1, or train.eval_every=0"
    ]
    user = warnings(FEW, train={"global_batch": 4}, data={"source": "helpers.own_models:Records"})
    assert "; give it val_len and val(index), or train.eval_every=0" in user[0]


def test_a_batch_larger_than_the_data() -> None:
    assert warnings(FEW, train={"eval_every": 0, "global_batch": 8}) == [
        "data.source synthetic has 5 training samples, fewer than train.global_batch=8, so a batch holds some of them "
        "more than once; train.global_batch=5 would not"
    ]


def test_sequences_beyond_the_positions_of_a_published_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    model = {"shape": "tiny", "positions": "rope", "pretrained": str(tmp_path)}
    job = Job.model_construct(**dict(parse_job({"data": {"source": "synthetic", "seq_len": 65}})))
    job = job.model_copy(update={"model": job.model.model_copy(update=model)})
    (text,) = data_warnings(job, Samples())
    assert text.startswith("data.seq_len=65 is longer than the 64 positions that ")
    assert text.endswith("; data.seq_len=64 would fit, or set model.rope_scaling")
