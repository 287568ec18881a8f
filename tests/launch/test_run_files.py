"""A failed start changes only files that it wrote itself."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.command import Started, run_of, step_of, weft, write_job
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.job.errors import Exit, FitError, JobError, MachineError
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.launch.run_files import RunFiles, write_job_and_plan
from weft.launch.train import check_processes, prepare
from weft.planner import Plan
from weft.supervisor.run_lock import run_lock

SMALL: dict[str, Any] = {
    "model": {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32},
    "data": {"seq_len": 16, "source": "synthetic"},
    "train": {"steps": 40, "global_batch": 2, "eval_every": 0},
    "checkpoint": {"every": 10},
    "parallel": {"dp_shard": 1},
    "cluster": {"device": "cpu"},
}
OWN = """
import numpy as np

class Late:
    train_len, val_len = 1000, 4

    def __init__(self, data):
        self.length = data.seq_len

    def train(self, index):
        tokens = np.arange(self.length + 1) % 7
        self.read = getattr(self, "read", 0) + 1
        targets = np.full(self.length, -100) if self.read <= 6 else tokens[1:]  # those of step 1, after four for checks
        return {"inputs": tokens[:-1], "targets": targets} if self.read < 57 else {"x": 1}

    val = train
"""
NAMES = (
    "thesis.txt", "job.yaml", "plan.json", "metrics.jsonl", "events.jsonl", ".lock", ".secret", "logs/rank-0.log",
    "logs/failure-0.json", "logs/mine.txt", "checkpoints/step-00000010/meta.json", "compiled/x", "samples/rank-0.jsonl",
    ".supervisor.json", "slices.json", "report.html",
)  # fmt: skip


def tree(folder: Path) -> dict[str, bytes | str]:
    """Every file and link below a folder."""
    found: dict[str, bytes | str] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = os.readlink(path)
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("job")
    write_job(folder, **SMALL)
    return prepare(load_job(str(folder / "job.yaml"), ()), 1)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**9))
def test_no_foreign_file_is_touched(prepared: Any, tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Random folders, links and leftovers of a failed start."""
    chance, base = random.Random(seed), tmp_path_factory.mktemp("tree")
    outside, run = base / "outside", RunDir(base / "runs" / "precious")
    outside.mkdir()
    (outside / "thesis.txt").write_text("x")
    if chance.random() < 0.7:
        run.path.mkdir(parents=True)
        for name in chance.sample(NAMES, chance.randrange(len(NAMES))):
            path = run.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if chance.random() < 0.2:
                path.symlink_to(outside / "thesis.txt")
            else:
                path.write_text(f"mine {seed}")
        if chance.random() < 0.2:
            shutil.rmtree(run.logs, ignore_errors=True)
            run.logs.symlink_to(outside, target_is_directory=True)
    before = tree(base)
    try:
        with run_lock(run, wait_s=0.0) as lock:
            files = RunFiles(run, lock.created)
            files.write(*prepared)
            committed = chance.random() < 0.3
            for path in (run.events, run.logs / "rank-0.log", *([run.metrics] if committed else [])):
                if not path.is_symlink() and not path.parent.is_symlink():
                    path.parent.mkdir(exist_ok=True)
                    with path.open("a") as file:
                        file.write("a line\n")
            files.undo()
    except JobError:
        pass
    after = tree(base)
    for name, content in before.items():
        appended = isinstance(content, bytes) and isinstance(after[name], bytes) and after[name].startswith(content)
        resumed = name.endswith(("job.yaml", "plan.json")) and not name.startswith("outside")
        assert after[name] == content or appended or (resumed and committed), name


def test_refused_start_keeps_a_folder_with_other_files(tmp_path: Path) -> None:
    write_job(tmp_path, **SMALL)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("x")
    result = weft(tmp_path, "train", "job.yaml", "runs_dir=.", "name=precious", "model={module: 'nosuchmod:Model'}")
    assert result.code == Exit.JOB, result.err
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "x"
    assert not (tmp_path / "precious" / "job.yaml").exists()


def test_wrong_sample_after_some_steps_keeps_the_run(tmp_path: Path) -> None:
    write_job(tmp_path, **{**SMALL, "checkpoint": {"every": 10, "background": False}})  # none is under way at the end
    (tmp_path / "late.py").write_text(OWN)
    result = weft(tmp_path, "train", "job.yaml", "data.source=late:Late", "model.vocab=16")
    run = run_of(tmp_path, "job")
    assert result.code == Exit.JOB, result.err
    assert result.err.count("had no valid target") == 1 and "step 1 had no valid target" in result.err
    assert step_of(run) >= 20
    assert (run.checkpoints / "step-00000020").exists()
    assert run.job.exists() and run.plan.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("job.yaml", "name: mine"), ("plan.json", "[]"), ("metrics.jsonl", "step,loss"), ("events.jsonl", '{"a": 1}'),
        ("slices.json", '["mine"]'), ("report.html", "<p>mine"), ("logs", "mine"), ("checkpoints", "mine"),
    ],
)  # fmt: skip
def test_folder_that_is_no_run_is_refused(prepared: Any, tmp_path: Path, name: str, content: str) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    (run.path / name).write_text(content)
    with pytest.raises(JobError, match="give the run another name="):
        RunFiles(run, created=False).write(*prepared)
    assert tree(run.path) == {name: content.encode()}


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "slices.json", "job.yaml"])
def test_links_and_pipes_in_place_of_files_are_refused(prepared: Any, tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_job_and_plan(run, *prepared)
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(JobError, match="is not a regular file"):
        write_job_and_plan(run, *prepared)
    (run.path / name).unlink()
    os.mkfifo(run.path / name)
    with pytest.raises(JobError, match="is not a regular file"):
        write_job_and_plan(run, *prepared)
    assert not (tmp_path / "outside").exists()


def test_what_a_refused_start_left_does_not_stop_the_next(prepared: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.metrics.touch()
    run.events.write_text('{"time": "", "event": "start"}\n{"torn')
    run.slices.write_text('{"axes": {}, "ranks": []}')
    write_job_and_plan(run, *prepared)
    assert run.job.exists()


def test_one_lock_for_all_ways_to_start(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with run_lock(run, shared=True) as lock, run_lock(run, 0.0, shared=True) as other:
        assert lock.created and not other.created
        assert (run.path / ".lock").stat().st_mode & 0o777 == 0o600
        with pytest.raises(JobError, match="is being trained by another process"), run_lock(run, 0.0):
            pass
    with run_lock(run), pytest.raises(JobError, match="another process"), run_lock(run, 0.0, shared=True):
        pass
    (run.path / ".lock").unlink()
    (run.path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JobError, match="must be a regular file"), run_lock(run, 0.0):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_lock_notices_a_moved_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with run_lock(run) as lock:
        lock.check()
        run.path.rename(tmp_path / "moved")
        with pytest.raises(MachineError, match="was moved or deleted while the run used it"):
            lock.check()


@pytest.mark.parametrize("options", [["--no-resilient"], ["--resilient"]])
def test_moved_run_folder_ends_the_run(tmp_path: Path, options: list[str]) -> None:
    write_job(tmp_path, **{**SMALL, "train": {**SMALL["train"], "steps": 100_000}})
    run = run_of(tmp_path, "job")
    started = Started(tmp_path, "train", "job.yaml", *options)
    started.wait_for(lambda: step_of(run) >= 3)
    run.path.rename(tmp_path / "moved")
    result = started.end()
    assert result.code == Exit.MACHINE, result.err
    assert "the run folder runs/job was moved or deleted" in result.last


def test_more_ranks_than_memory_are_refused() -> None:
    plan = Plan(device="cpu", device_name="cpu", backend="gloo", dp_replicate=10**6)
    with pytest.raises(FitError, match=r"1000000 ranks on this machine take 64 MiB each .*ranks would work"):
        check_processes(plan)
    check_processes(replace(plan, dp_replicate=2))
    check_processes(replace(plan, device="cuda"))
