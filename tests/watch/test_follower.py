"""The process beside a run: trackers receive every step once, and one that fails or hangs is reported once."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.job.errors import MachineError
from weft.job.files.run_folder import RunDir
from weft.job.load import dump_yaml, load_job
from weft.job.schema import Job
from weft.job.watch import TRACKERS, TrackerKind, Watch
from weft.watch import follower
from weft.watch.journal import Journal, read_jsonl
from weft.watch.tracker_adapter import TrackedRun, TrackedStep


class Recorder:
    """A tracker that keeps what it is given."""

    steps: list[int] = []  # noqa: RUF012
    ends: list[str] = []  # noqa: RUF012

    def __init__(self, run: TrackedRun) -> None:
        run.state["opened"] = run.state.get("opened", 0) + 1

    def log(self, steps: list[TrackedStep]) -> None:
        Recorder.steps += [s.step for s in steps]

    def event(self, kind: str, text: str, step: int | None, bad: bool) -> None:
        """Not kept."""

    def finish(self, status: str, report: Path | None) -> None:
        Recorder.ends.append(status)


class Broken(Recorder):
    """A tracker that fails."""

    def log(self, steps: list[TrackedStep]) -> None:
        raise ConnectionError("no such host")


class Hanging(Recorder):
    """A tracker that never answers."""

    def log(self, steps: list[TrackedStep]) -> None:
        threading.Event().wait()


@pytest.fixture
def trackers() -> Iterator[None]:
    for name in ("Recorder", "Broken", "Hanging"):
        TRACKERS.register(TrackerKind(name.lower(), "", "json", f"{__name__}:{name}"))
    Recorder.steps, Recorder.ends = [], []
    yield
    for name in ("recorder", "broken", "hanging"):
        del TRACKERS._entries[name]


def write_job(run: RunDir, **watch: Any) -> None:
    run.path.mkdir(exist_ok=True)
    run.job.write_text(dump_yaml(load_job("tiny").model_copy(update={"watch": Watch(**watch)})))


def follow_all(run: RunDir, ended: Callable[[], bool] = lambda: True) -> list[dict[str, Any]]:
    """Follow a run until its files are read; returns the reports of failures."""
    follower.follow(run, lambda seconds: ended())
    return [e for e in read_jsonl(run.events) if e["event"] == "watch_failed"]


def test_every_step_once_over_resumes(tmp_path: Path, trackers: None) -> None:
    run = RunDir(tmp_path / "run")
    write_job(run, trackers=["recorder"])
    with Journal(run) as journal:
        journal.event("start", step=0)
        for step in (1, 2, 3, 2, 3, 4):  # rolled back once
            journal.metrics({"step": step, "loss": 1.0})
        assert follow_all(run) == [] and Recorder.ends == ["failed"]
        journal.event("start", step=2)
        for step in (3, 4, 5):
            journal.metrics({"step": step, "loss": 1.0})
        journal.event("done", step=5)
    assert follow_all(run) == []
    assert Recorder.steps == [1, 2, 3, 4, 5]
    assert Recorder.ends == ["failed", "done"]


def test_failures_are_reported_once_and_stop_nothing(
    tmp_path: Path, trackers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "FINISH_S", 3.0)
    run = RunDir(tmp_path / "run")
    write_job(run, trackers=["broken", "recorder", "hanging"])
    with Journal(run) as journal:
        for step in (1, 2, 3):
            journal.metrics({"step": step, "loss": 1.0})
        journal.event("done", step=3)
    failures = {e["what"]: e["why"] for e in follow_all(run, lambda: len(Recorder.steps) == 3)}
    assert set(failures) == {"tracker broken", "tracker hanging"}
    assert "ConnectionError: no such host" in failures["tracker broken"]
    assert Recorder.steps == [1, 2, 3] and Recorder.ends == ["done"]


def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"needs the package wandb: pip install 'weft\[wandb\]'"):
        follower.check_trackers(Job(watch=Watch(trackers=["wandb"])))


def test_the_process_ends_with_its_launcher(tmp_path: Path, make_run: Callable[..., RunDir]) -> None:
    run = make_run(tmp_path / "run", steps=5)
    write_job(run, prometheus=str(tmp_path / "run.prom"))
    with follower.following(run, load_job(str(run.job)), print):
        pass
    assert 'weft_step{run="tiny"} 5' in (tmp_path / "run.prom").read_text()
