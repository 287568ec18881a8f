"""A run with train.batch_ramp: resumed in the middle of the ramp and on other layouts, it is the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.command import ids_by_step, losses, run_of, weft, write_job

RAMP = [[4, 2], [8, 4]]
JOB: dict[str, Any] = {
    "model": {"dim": 16, "layers": 4, "heads": 2, "ffn": 32},
    "data": {"seq_len": 16, "record_ids": True},
    "train": {"steps": 12, "global_batch": 8, "batch_ramp": RAMP, "eval_every": 0},
    "optim": {"schedule": "constant", "warmup": 0},
    "checkpoint": {"every": 3},
    "cluster": {"device": "cpu"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ramp")
    write_job(path, **JOB)
    done = weft(path, "train", "job.yaml", "name=whole", "--nproc", "1")
    assert done.code == 0, done.err
    return path


def check(folder: Path, name: str, exact: bool) -> None:
    """Every step has the samples and the loss of the whole run."""
    ids, whole = ids_by_step(run_of(folder, name)), losses(run_of(folder, "whole"))
    begin = 0
    for step in range(1, 13):
        size = 2 if step <= 4 else 4 if step <= 8 else 8
        assert sorted(ids[step]) == list(range(begin, begin + size))
        begin += size
    for step, values in losses(run_of(folder, name)).items():
        assert values[-1] == (whole[step][0] if exact else pytest.approx(whole[step][0], rel=1e-4)), step


def test_resuming_in_the_ramp_is_exact(folder: Path) -> None:
    check(folder, "whole", exact=True)
    for steps in ("6", "12"):
        done = weft(folder, "train", "job.yaml", "name=parts", f"train.steps={steps}", "--nproc", "1")
        assert done.code == 0, done.err
    check(folder, "parts", exact=True)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("shards", "{dp_shard: 2, zero: 3}"), ("stages", "{dp_shard: 1, pp: 2, microbatches: 2}")],
)
def test_a_ramp_is_the_same_run_in_every_layout(folder: Path, name: str, layout: str) -> None:
    done = weft(folder, "train", "job.yaml", f"name={name}", f"parallel={layout}", "--nproc", "2")
    assert done.code == 0, done.err
    check(folder, name, exact=False)
