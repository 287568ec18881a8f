"""Damaged side files never stop a resume and never spoil the end of a good run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.command import ids_by_step, run_of, weft, write_job

from weft.watch.journal import read_metrics

JOB: dict[str, Any] = {
    "model": {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32},
    "data": {"seq_len": 16, "source": "synthetic", "record_ids": True},
    "train": {"steps": 12, "global_batch": 2, "eval_every": 4, "eval_batches": 1},
    "checkpoint": {"every": 6},
    "parallel": {"dp_shard": 1},
    "cluster": {"device": "cpu"},
}
BAD_LINES = [
    b'{"step": "seven", "loss": "low", "grad_norm": [1], "step_time_s": {}, "peak_memory_gib": "x"}\n',
    b'{"step": 3, "loss": "low", "grad_norm": null}\n',
    b'{"event": "eval", "step": 4, "val_loss": "good"}\n{"event": "eval", "step": [], "val_loss": 1}\n',
    b'{"event": "done", "predicted": "much", "seconds": "long"}\n{"event": 3}\n[1, 2]\nnull\n',
    b'{"step": 1' + b"0" * 500 + b', "ids": [1]}\n{"step": 2, "ids"\n\xff\xfe\x00\n{}\n',
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_job(folder, **JOB)
    lost = run_of(folder, "job").samples / "rank-5.jsonl"  # of a rank that was lost before the first checkpoint
    lost.parent.mkdir(parents=True)
    lost.write_text('{"step": 1, "ids": [0], "indices": [7]}\n')
    assert weft(folder, "train", "job.yaml").code == 0
    assert lost.read_text() == ""
    return folder


def test_damaged_lines_do_not_stop_a_resume(trained: Path) -> None:
    run = run_of(trained, "job")
    for path in (run.metrics, run.events, run.samples / "rank-0.jsonl"):
        good = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(good[:5] + BAD_LINES + good[5:]) + b'{"torn')
    (run.samples / "rank-7.jsonl").mkdir()
    (trained / "mine.txt").write_text("mine")
    (run.samples / "rank-8.jsonl").symlink_to(trained / "mine.txt")
    result = weft(trained, "train", "job.yaml", "train.steps=20")
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    assert "done: step 20" in result.err
    assert "could not be drawn" not in result.err
    assert read_metrics(run.metrics)[-1]["step"] == 20
    assert (trained / "mine.txt").read_text() == "mine"
    read = ids_by_step(run)
    assert sorted(i for step in range(1, 21) for i in read[step]) == list(range(40))
    assert all(json.loads(line)["ids"] for line in (run.samples / "rank-0.jsonl").read_text().splitlines())
