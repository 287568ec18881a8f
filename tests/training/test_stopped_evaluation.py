"""A stop signal during an evaluation: it ends at its next batch, and is done when the run continues."""

from __future__ import annotations

from pathlib import Path

from helpers.command import Output, python, run_of, step_of, write_job

from weft.checkpoint.format import newest_good
from weft.job.files.run_folder import RunDir
from weft.watch.journal import read_jsonl, read_metrics

MODEL = """
import os, signal
from helpers.own_models import Plain

class Model(Plain):
    calls = 0

    def forward(self, tokens):
        if not self.training:
            Model.calls += 1
            if os.environ["RANK"] == "0":
                with open("calls", "a") as file:
                    file.write("x")
                if Model.calls == int(os.environ["STOP_AT"]):
                    os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(tokens)
"""
EVALUATION = 3
"""Batches of an evaluation; rank 0 has one forward pass of each."""


def train(folder: Path, name: str, stop_at: int = 0) -> tuple[Output, int]:
    """Run until its end, or until the given forward pass in evaluation; the output and the number of such passes."""
    (folder / "calls").write_text("")
    out = python(folder, "-m", "weft", "train", "job.yaml", f"name={name}", "--nproc", "2", STOP_AT=str(stop_at))
    return out, len((folder / "calls").read_text())


def evaluations(run: RunDir) -> dict[int, float]:
    found = [(e["step"], e["val_loss"]) for e in read_jsonl(run.events) if e["event"] == "eval"]
    assert len(found) == len(dict(found))
    return dict(found)


def test_stopped_evaluation_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "stopping_model.py").write_text(MODEL, encoding="utf-8")
    write_job(
        tmp_path, model={"module": "stopping_model:Model", "vocab": 256}, data={"source": "synthetic", "seq_len": 16},
        train={"steps": 4, "global_batch": 4, "microbatch": 2, "eval_every": 2, "eval_batches": EVALUATION},
        checkpoint={"every": 0}, cluster={"device": "cpu"}, parallel={"dp_shard": 2},
    )  # fmt: skip
    whole, run = run_of(tmp_path, "whole"), run_of(tmp_path, "stopped")
    result, calls = train(tmp_path, "whole")
    assert (result.code, calls) == (0, 3 * EVALUATION), result.err
    expected = evaluations(whole)
    assert sorted(expected) == [0, 2, 4]

    result, calls = train(tmp_path, "stopped", stop_at=EVALUATION + 1)
    assert (result.code, calls) == (75, EVALUATION + 1), result.err
    saved = newest_good(run.checkpoints)
    assert saved is not None and saved.step == step_of(run) == 2
    assert sorted(evaluations(run)) == [0]

    result, calls = train(tmp_path, "stopped", stop_at=EVALUATION + 2)  # in the evaluation after the last step
    assert (result.code, calls) == (75, EVALUATION + 2), result.err
    saved = newest_good(run.checkpoints)
    assert saved is not None and saved.step == step_of(run) == 4
    assert sorted(evaluations(run)) == [0, 2]

    result, calls = train(tmp_path, "stopped")
    assert (result.code, calls) == (0, EVALUATION), result.err
    assert evaluations(run) == expected
    recorded = [{r["step"]: r.get("val_loss") for r in read_metrics(each.metrics)} for each in (whole, run)]
    assert recorded[0] == recorded[1] == {1: None, 2: expected[2], 3: None, 4: expected[4]}
