"""Evaluations and checkpoints after each epoch, and runs that write no checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.command import Output, weft

from weft.data.sample_order import Calendar
from weft.job.files.run_folder import RunDir
from weft.job.train import BatchRamp
from weft.watch.journal import read_jsonl

JOB = {
    "name": "epochs", "model": {"dim": 16, "layers": 1, "heads": 2, "vocab": 256},
    "data": {"source": "words.txt", "seq_len": 16, "tokenizer": "bytes", "format": "text", "val_fraction": 0.1},
    "train": {"epochs": 3, "global_batch": 32, "eval_every": "epoch", "eval_batches": 1, "metrics": ["accuracy"]},
    "cluster": {"device": "cpu"}, "parallel": {"dp_shard": 1},
    "checkpoint": {"every": "epoch", "keep": 9},
}  # fmt: skip


def test_epochs_end_in_the_step_that_reads_their_last_sample() -> None:
    calendar = Calendar(steps=10, epoch_samples=100, ramp=BatchRamp(32))
    assert [step for step in range(1, 11) if calendar.due("epoch", step)] == [4, 7, 10]
    assert [step for step in range(1, 11) if calendar.recurs("epoch", step)] == [4, 7, 10]
    assert [calendar.newest("epoch", step) for step in (0, 3, 4, 6, 9)] == [0, 0, 4, 4, 7]
    ramped = Calendar(steps=12, epoch_samples=100, ramp=BatchRamp(32, ((3, 4),)))
    assert [step for step in range(1, 13) if ramped.due("epoch", step)] == [6, 9, 12]
    tiny = Calendar(steps=4, epoch_samples=10, ramp=BatchRamp(32))
    assert [tiny.name(step) for step in (1, 2)] == ["epoch 3, step 1", "epoch 6, step 2"]


def test_numbers_of_steps_and_never() -> None:
    calendar = Calendar(steps=10, epoch_samples=100, ramp=BatchRamp(32))
    assert [step for step in range(11) if calendar.due(4, step)] == [0, 4, 8, 10]
    assert [step for step in range(1, 11) if calendar.recurs(4, step)] == [4, 8]
    assert [step for step in range(1, 11) if calendar.due(0, step)] == [10]
    assert not any(calendar.due("never", step) for step in range(1, 11))
    assert calendar.due(4, 9, before=7) and not calendar.due(4, 7, before=4)


def test_a_run_in_epochs(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("one two three four five six seven\n" * 60)
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    result = weft(tmp_path, "train", "job.yaml")
    assert result.code == 0, result.err
    assert "epoch 1, step 4: validation loss" in result.err and "epoch 3.09/3 " in result.err
    run = RunDir(tmp_path / "runs" / "epochs")
    records = {record["step"]: record for record in read_jsonl(run.metrics)}
    assert records[1]["epoch"] == pytest.approx(32 / 114, abs=1e-6)
    assert [step for step, record in records.items() if "val_accuracy" in record] == [4, 8, 11]
    assert [entry.name for entry in sorted(run.checkpoints.iterdir())] == [f"step-{n:08}" for n in (4, 8, 11)]


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    result = weft(tmp_path, "train", "tiny", "name=rehearsal", "train.steps=2", "checkpoint.every=never")
    assert result.code == 0, result.err
    assert "checkpoint.every=never: no checkpoint is written" in result.err
    assert not any((tmp_path / "runs" / "rehearsal").glob("checkpoints/*"))


@pytest.mark.parametrize(("override", "message"), [
    ("checkpoint.every=always", "epoch"), ("train.eval_every=-1", "must be from 0 to 10^12, or epoch"),
    ("train.eval_every=never", "epoch"),
])  # fmt: skip
def test_other_intervals_are_refused(in_process: Callable[..., Output], tmp_path: Path, override: str,
                                     message: str) -> None:  # fmt: skip
    result = in_process(tmp_path, "plan", "tiny", override)
    assert result.code == 2 and message in result.err and override.split("=")[0] in result.err
