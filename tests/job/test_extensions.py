"""An optimizer, a compressor and a model family of a user's own: the schema, `weft plan` and `weft train` know them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.command import python, weft

from weft.job.errors import JobError
from weft.job.load import load_job, parse_job
from weft.planner.engine_constants import GRADIENT_ALIGNMENT

JOB = """\
name: own
extensions: [helpers.extensions.lion, helpers.extensions.float8, helpers.extensions.residual_mlp]
model: {family: residual-mlp, dim: 32, layers: 4}
data: {source: synthetic}
train: {steps: 30, global_batch: 8, eval_every: 0}
optim: {name: lion, lr: 1e-3, warmup: 10, schedule: inverse-sqrt}
comm: {compression: float8}
parallel: {dp_replicate: 2, dp_shard: 1}
cluster: {device: cpu, devices_per_node: 2}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "own.yaml").write_text(JOB)
    return tmp_path


def test_the_schema_lists_registered_names(job: Path) -> None:
    code = (
        "import json; from weft.job import Job, load_job; load_job('own.yaml'); d = Job.model_json_schema()['$defs'];"
        "print(json.dumps([d['Optim']['properties']['name']['enum'], d['Model']['properties']['family']]))"
    )
    optimizers, family = json.loads(python(job, "-c", code).out)
    assert sorted(optimizers) == ["adafactor", "adamw", "lamb", "lars", "lion", "muon", "sgd"]
    assert "residual-mlp" in json.dumps(family)


def test_plan_uses_the_entries(job: Path) -> None:
    def estimate(*overrides: str) -> dict[str, dict[str, float]]:
        found = weft(job, "plan", "own.yaml", "--json", *overrides)
        assert found.code == 0, found.err
        figures: dict[str, dict[str, float]] = json.loads(found.out)["estimate"]
        return figures

    numbers = 4 * (32 * 32 + 32)
    own, plain = estimate(), estimate("optim.name=adamw", "comm.compression=none")
    assert own["memory"]["optimizer"] == 4 * numbers / 2**30 < plain["memory"]["optimizer"]
    matrices, vectors = 4 * 32 * 32, 4 * GRADIENT_ALIGNMENT  # a byte each way; in fp32
    counts = 2 * 8  # valid targets and the norm, in fp64
    assert own["bytes"]["dp_replicate"] == 2 * matrices + 4 * vectors + counts < plain["bytes"]["dp_replicate"]


def test_train_runs_them_on_two_ranks(job: Path) -> None:
    done = weft(job, "train", "own.yaml")
    assert done.code == 0, done.err
    losses = [json.loads(line)["loss"] for line in (job / "runs/own/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.9 * losses[0]
    again = weft(job, "train", "own.yaml", "optim.name=lionn")
    assert again.code == 2 and "must be adamw, sgd, " in again.err and "; did you mean lion?" in again.err


def test_only_a_job_file_imports_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs in checkpoints and run records pass through parse_job, which imports nothing."""
    (tmp_path / "job.yaml").write_text("extensions: [no_such_module]")
    with pytest.raises(JobError, match="extensions: no_such_module: cannot import no_such_module"):
        load_job(str(tmp_path / "job.yaml"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for code, raised in {
        "def f(:": "SyntaxError",
        "1 / 0": "ZeroDivisionError",
        "raise SystemExit(0)": "SystemExit",
    }.items():
        (tmp_path / f"raises_{raised}.py").write_text(code)
        (tmp_path / "job.yaml").write_text(f"extensions: [raises_{raised}]")
        with pytest.raises(JobError, match=f"extensions: raises_{raised}: importing raises_{raised} raised {raised}"):
            load_job(str(tmp_path / "job.yaml"))
    assert parse_job({"extensions": ["no_such_module"]}).extensions == ("no_such_module",)
    with pytest.raises(JobError, match="must be names of Python modules"):
        parse_job({"extensions": ["os:system"]})


EVERYTHING = """\
name: mixers
extensions: [helpers.extensions.everything]
model: {family: mixer, dim: 32, layers: 2}
data: {source: "helpers.extensions.everything:Rows", seq_len: 8}
train: {steps: 6, global_batch: 8, eval_every: 0}
parallel: {dp_replicate: 2, dp_shard: 1}
cluster: {device: cpu, devices_per_node: 2}
watch: {alerts: {to: [{notebook: notes.jsonl}]}}
"""


def test_one_file_adds_a_family_a_device_a_detector_and_targets(tmp_path: Path) -> None:
    (tmp_path / "mixers.yaml").write_text(EVERYTHING)
    run = tmp_path / "runs/mixers"

    done = weft(tmp_path, "launch", "mixers.yaml", "--on", "other-place")
    assert done.code == 0, done.err
    faults = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if "third_step" in line]
    assert [fault["step"] for fault in faults] == [3, 6]
    notes = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    assert "step 3 is a third one" in {note["text"] for note in notes}

    counted = weft(tmp_path, "dryrun", "mixers.yaml", "--json")
    assert counted.code == 0, counted.err
    traced, estimated = (json.loads(counted.out)[key] for key in ("traced", "estimated"))
    assert estimated["flops"] == traced["flops"]
    assert estimated["peak_memory"] == pytest.approx(traced["peak_memory"], rel=0.1)

    proof = weft(tmp_path, "prove", "mixers.yaml", "-l", "zero3", "--steps", "1", "--json")
    assert proof.code == 0 and json.loads(proof.out)["same"], proof.err

    plan = weft(tmp_path, "plan", "mixers.yaml", "cluster.device=abacus", "parallel=auto", "--json")
    assert plan.code == 0, plan.err
    assert json.loads(plan.out)["device_name"] == "abacus"
