"""`weft launch` on this machine, and what all targets share: clusters of a file, records, lists and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import parity
from helpers.command import Output, Started, losses, run_of, until, weft, write_job

from weft.job.load import load_job
from weft.launch.launch_job import plan_for
from weft.launch.targets.known_targets import find_target
from weft.launch.targets.target_kinds import LAUNCH_TARGETS

InProcess = Callable[..., Output]


def write_small_job(folder: Path, steps: int = 3, **cluster: object) -> None:
    sections = {**parity.BASE, "name": "run", "cluster": {"device": "cpu", "devices_per_node": 1, **cluster}}
    sections["train"] = {**sections["train"], "steps": steps, "eval_every": 0}
    write_job(folder, **sections)


def test_local_launch_is_followed_listed_and_logged(tmp_path: Path, in_process: InProcess, interpreter: str) -> None:
    write_small_job(tmp_path, python=interpreter)
    done = weft(tmp_path, "launch", "job.yaml", "--on", "local")
    assert done.code == 0, done.err
    assert "run is local job" in done.err
    assert "done: step 3" in done.err
    (row,) = json.loads(in_process(tmp_path, "runs", "--json").out)["runs"]
    assert {k: row[k] for k in ("name", "state", "target", "last_step", "steps", "exit_code")} == {
        "name": "run", "state": "done", "target": "local", "last_step": 3, "steps": 3, "exit_code": 0,
    }  # fmt: skip
    assert "done: step 3" in in_process(tmp_path, "logs", "run").out
    output = tmp_path / "runs/run/launch/output.log"
    output.write_bytes(b"old\n" * 100 + output.read_bytes())
    attached = in_process(tmp_path, "attach", "run")
    assert (attached.code, attached.err.count("done: step 3"), attached.err.count("\n")) == (0, 1, 20)
    assert "rank 0 of 1" in in_process(tmp_path, "logs", "run", "--rank", "0").out
    assert "there are ranks 0 to 0" in in_process(tmp_path, "logs", "run", "--rank", "7").last
    assert "has already ended" in in_process(tmp_path, "stop", "run").last


def test_detached_launch_is_stopped(tmp_path: Path, in_process: InProcess, interpreter: str) -> None:
    write_small_job(tmp_path, steps=1_000_000, python=interpreter)
    assert in_process(tmp_path, "launch", "job.yaml", "--on", "local", "--detach").code == 0
    run = run_of(tmp_path, "run")
    until(lambda: bool(losses(run)))
    again = in_process(tmp_path, "launch", "job.yaml", "--on", "local")
    assert (again.code, "is already local job" in again.last) == (2, True)
    attached = Started(tmp_path, "attach", "run")
    assert in_process(tmp_path, "stop", "run").code == 0
    assert attached.end().code == 75
    assert json.loads(in_process(tmp_path, "runs", "--json").out)["runs"][0]["state"] == "stopped"


def test_run_of_weft_train_is_not_stopped(tmp_path: Path, in_process: InProcess) -> None:
    run = tmp_path / "runs" / "by-train"
    run.mkdir(parents=True)
    (run / "job.yaml").write_text("name: by-train\n", encoding="utf-8")
    for command in ("stop", "attach"):
        refused = in_process(tmp_path, command, "by-train")
        assert (refused.code, "was started by weft train, not by weft launch" in refused.last) == (2, True)


def test_damaged_records_and_a_controller_that_is_away(
    tmp_path: Path, in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"target": "slurm", "job_id": "7", "run": "", "host": "h", "submitted": 0, "nodes": 1, "ranks": 1}
    for name, record in {
        "good": good, "list": {**good, "target": ["slurm"]}, "none": [],
        "settings": {**good, "settings": {"nodes": -3}},
    }.items():  # fmt: skip
        folder = tmp_path / "runs" / name / "launch"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(record))
    scontrol = tmp_path / "scontrol"  # the real one tries for 18 s
    scontrol.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    rows = {row["name"]: row for row in json.loads(in_process(tmp_path, "runs", "--json").out)["runs"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "good": "running", "list": "not started", "none": "not started", "settings": "lost",
    }  # fmt: skip
    assert "Unable to contact" in rows["good"]["detail"] and "cluster.nodes=-3" in rows["settings"]["detail"]
    (tmp_path / "runs" / "good" / "launch" / "record.json").write_text(json.dumps({**good, "target": "ray"}))
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = in_process(tmp_path, "stop", "good")
    assert (refused.code, "the state of good is unknown: --on ray needs the package ray" in refused.last) == (4, True)


def test_refused_submission_leaves_no_files(
    tmp_path: Path, in_process: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_job(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no sbatch here" in in_process(tmp_path, "launch", "job.yaml", "--on", "slurm").last
    assert not (tmp_path / "runs").exists()


def test_node_without_a_shared_folder_gets_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    request = plan_for(
        "job.yaml", ["checkpoint.to=s3://bucket/it's", "cluster.workdir=" + str(tmp_path / "w")], "local"
    )[1]
    job = request.launch_folder / "submitted.yaml"
    shown = subprocess.run(["bash", "-c", request.node_script("pwd")], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == str(tmp_path / "w")
    assert load_job(str(job)) == request.job


def test_print_and_dry_run_write_nothing(tmp_path: Path, in_process: InProcess) -> None:
    write_small_job(tmp_path)
    printed = in_process(tmp_path, "launch", "job.yaml", "--on", "local", "--print")
    assert printed.out.rstrip().endswith("runs/run/launch/submitted.yaml --nproc 1")
    assert in_process(tmp_path, "launch", "job.yaml", "--on", "local", "--dry-run").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_plan_that_does_not_fit_is_not_submitted(tmp_path: Path, in_process: InProcess) -> None:
    refused = in_process(
        tmp_path, "launch", "llama-70b-64xh100", "cluster.nodes=1", "parallel=auto", "--on", "local", "--detach"
    )
    assert refused.code == 3, refused.err
    assert list(tmp_path.iterdir()) == []


def test_clusters_of_the_file(tmp_path: Path, in_process: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = tmp_path / "clusters.yaml"
    monkeypatch.setenv("WEFT_CLUSTERS", str(clusters))
    write_small_job(tmp_path)
    clusters.write_text("desk: {target: local, python: /opt/python, devices_per_node: 4}\nbad: {target: [x]}\n")
    printed = in_process(tmp_path, "launch", "job.yaml", "--on", "desk", "--print").out
    assert printed.startswith("/opt/python -m weft train")
    assert printed.rstrip().endswith("--nproc 1"), "the job's own fields take precedence"
    unknown = in_process(tmp_path, "launch", "job.yaml", "--on", "dsk", "--print")
    assert (unknown.code, "did you mean desk?" in unknown.last) == (2, True)
    assert "bad.target must be one of local" in in_process(tmp_path, "launch", "job.yaml", "--on", "bad").last
    for text, sentence in (
        ("- 1", "must hold clusters by name"), ("desk: {target: local, target: ssh}", "'target' is repeated"),
        ("desk: " + "[" * 2000, "is nested too deeply"), ("desk: {", "is not YAML"),
    ):  # fmt: skip
        clusters.write_text(text)
        assert sentence in in_process(tmp_path, "launch", "job.yaml", "--on", "desk").last


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "give --on TARGET"),
        (["--on", "local", "cluster.partition=gpu"], "cluster.partition is not used by the target local"),
        (["--on", "local", "cluster.nodes=2"], "--on local has one node"),
        (["--on", "local", "cluster.time_limit=soon"], "must be minutes"),
        (["--on", "local", "cluster.volumes=[x]"], "must be SOURCE:PATH"),
        (["--on", "local", "cluster.environment={1a: 2}"], "names of environment variables"),
    ],
)
def test_refusals(tmp_path: Path, in_process: InProcess, words: list[str], text: str) -> None:
    write_small_job(tmp_path)
    refused = in_process(tmp_path, "launch", "job.yaml", *words)
    assert refused.code == 2
    assert text in refused.err


def test_range_of_nodes(tmp_path: Path, in_process: InProcess) -> None:
    write_small_job(tmp_path, nodes="1..3")
    printed = in_process(tmp_path, "launch", "job.yaml", "--on", "slurm", "--print").out
    assert "#SBATCH --nodes=1-3\n" in printed
    refused = in_process(tmp_path, "launch", "job.yaml", "cluster.nodes=3..2", "--on", "slurm")
    assert (refused.code, "must be at least cluster.nodes=3" in refused.last) == (2, True)


def test_registered_targets_are_complete() -> None:
    for name in LAUNCH_TARGETS.names():
        target = find_target(name)
        assert target.name == name
        assert target.summary
