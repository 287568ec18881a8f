"""A run that version 0.1.0 wrote and stopped at step 16 opens, generates, exports, reports and resumes.

`run-0.1.0/` is its folder, two ranks with ZeRO 3; `run-0.1.0-continued.jsonl` is how 0.1.0 itself continued it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.command import run_of, weft

from weft.checkpoint.format import newest_good, verify
from weft.checkpoint.reader import Index
from weft.cli.results import export, generate, report
from weft.watch.journal import read_jsonl

HERE = Path(__file__).parent
STOPPED_AT, STEPS = 16, 24


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose runs/run-0.1.0 is a copy of the kept run."""
    shutil.copytree(HERE / "run-0.1.0", tmp_path / "runs" / "run-0.1.0")
    return tmp_path


def test_the_checkpoint_opens_and_names_no_module_of_weft() -> None:
    found = newest_good(HERE / "run-0.1.0" / "checkpoints")
    assert found is not None and found.step == STOPPED_AT
    assert verify(found.path) is None
    tensors = Index(found.path).tensors
    assert tensors["model.embed.weight"].size == torch.Size([256, 16])
    assert {name.partition(".")[0] for name in tensors} == {"model", "optim", "ema", "random"}
    assert not any(b"weft" in path.read_bytes() for path in found.path.iterdir() if path.suffix != ".json")


def test_it_generates_exports_and_reports(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    generate("run-0.1.0", tokens=8, temperature=0, as_json=True)
    assert json.loads(capsys.readouterr().out)["step"] == STOPPED_AT
    export("run-0.1.0", ema=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["step"] == STOPPED_AT
    report("run-0.1.0")
    assert run_of(folder, "run-0.1.0").report.stat().st_size > 0


LAYOUTS = {"same layout": ("{dp_shard: 2, zero: 3}", 2), "one rank": ("{dp_shard: 1}", 1)}


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS.values(), ids=LAYOUTS)
def test_it_resumes_with_the_losses_of_its_own_continuation(folder: Path, layout: str, ranks: int) -> None:
    resumed = weft(
        folder, "train", "runs/run-0.1.0/job.yaml", f"train.steps={STEPS}", f"parallel={layout}", "--nproc", str(ranks)
    )
    assert resumed.code == 0, resumed.err
    assert f"resumed from step {STOPPED_AT}" in resumed.err
    continued = read_jsonl(HERE / "run-0.1.0-continued.jsonl")
    records = read_jsonl(run_of(folder, "run-0.1.0").metrics)[STOPPED_AT:]
    for expected, record in zip(continued, records, strict=True):
        assert {key: record[key] for key in expected} == pytest.approx(expected, rel=1e-5)
