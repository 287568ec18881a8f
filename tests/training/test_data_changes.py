"""Data that is replaced or damaged under a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.command import Started, weft

from weft.data.build_store import build
from weft.job.data import Data, sample_fields

JOB = (
    "train", "tiny", "data.source=store", "data.seq_len=32", "train.global_batch=4", "train.eval_every=0",
    "checkpoint.every=2", "checkpoint.background=false", "name=run",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("tea and cake " * 2000)
    (tmp_path / "b.txt").write_text("cake and tea " * 2000)
    build(tmp_path / "a.txt", tmp_path / "store", workers=1)
    build(tmp_path / "b.txt", tmp_path / "other", workers=1)
    return tmp_path


def test_a_replaced_store_and_a_changed_field_are_reported_on_resume(folder: Path) -> None:
    assert weft(folder, *JOB, "--no-resilient", "train.steps=2").code == 0
    assert "replaced" not in weft(folder, *JOB, "--no-resilient", "train.steps=4").err
    (folder / "store").rename(folder / "first")
    (folder / "other").rename(folder / "store")
    again = weft(folder, *JOB, "--no-resilient", "train.steps=6", "data.drop_last=true")
    assert again.code == 0 and "data.source store was replaced since step 4" in again.out + again.err
    assert "data.drop_last was False until here and is True now: other samples follow" in again.out + again.err
    events = [json.loads(line) for line in (folder / "runs/run/events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "data_changed"] == [4]


def test_a_store_truncated_under_a_run_ends_it_with_a_sentence(folder: Path) -> None:
    run = Started(folder, *JOB, "train.steps=100000", "data.prefetch=0")
    checkpoints = folder / "runs/run/checkpoints"
    run.wait_for(lambda: checkpoints.is_dir() and any(p.name.startswith("step") for p in checkpoints.iterdir()))
    os.truncate(folder / "store/tokens.bin", 100)
    ended = run.end()
    assert ended.code == 2, ended.err
    assert "tokens.bin became shorter while it was read" in ended.last or "tokens.bin has 100 bytes" in ended.last
    assert any(checkpoints.iterdir()) and (folder / "runs/run/metrics.jsonl").stat().st_size


def test_every_field_of_data_but_those_of_the_loader_determines_the_samples() -> None:
    assert set(Data.model_fields) - set(sample_fields()) == {"prefetch", "workers", "record_ids"}
