"""Every tracker's own reader reads back what was written."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.command import until

from weft.extensions.trackers.sink import TrackerSink, export_to_tracker
from weft.job.files.run_folder import RunDir
from weft.job.load import dump_yaml, load_job
from weft.watch.journal import Journal

STEPS = list(range(1, 13))


@pytest.fixture
def run(tmp_path: Path, make_run: Callable[..., RunDir]) -> RunDir:
    found = make_run(tmp_path / "runs/run", steps=12)
    found.job.write_text(dump_yaml(load_job("tiny", ["watch.alerts.to=[{webhook: https://secret.example/key}]"])))
    found.report.write_text("<p>report</p>")
    with Journal(found) as journal:
        journal.event("fault", fault="nan", step=6, why="the loss is nan")
    return found


def losses(run: RunDir) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]


def test_tensorboard(run: RunDir, in_process: Callable[..., Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = in_process(run.path.parent.parent, "export", "run", "--to", "tensorboard", "--json")
    assert out.code == 0 and json.loads(out.out)["steps"] == 12
    found = EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    assert [s.step for s in found.Scalars("train/loss")] == STEPS
    assert [s.value for s in found.Scalars("train/loss")] == pytest.approx(losses(run), rel=1e-6)
    texts = found.Tags()["tensors"]
    assert "job/text_summary" in texts and "plan/text_summary" in texts and "events/fault/text_summary" in texts
    assert b"secret.example" not in found.Tensors("job/text_summary")[0].tensor_proto.string_val[0]
    again = in_process(run.path.parent.parent, "export", "run", "--to", "tensorboard")
    assert again.code == 2 and "its curves would be doubled" in again.err


RECORD = {
    "step": 3, "wall_time": 1.7e9, "loss": 2.0, "loss/colour": 1.0, "val_loss": 2.1, "val_accuracy": 0.5, "lr": 1e-3,
    "grad_norm": 1.0, "tokens": 64, "step_time_s": 0.2, "tokens_per_s": 320.0, "mfu": 0.4, "peak_memory_gib": 1.0,
    "unit": "samples", "rewards": 0.7, "experts": {"max_over_mean": 1.5}, "comm_gb_per_s": {"tp": 2.0}, "power_w": 9.0,
    "ranks": {"busy_s": [0.1, 0.3], "wait_s": {"tp": [0.0, 0.2]}},
}  # fmt: skip
MAIN = {
    "train/loss", "train/loss/colour", "val/loss", "val/accuracy", "train/lr", "train/grad_norm", "train/rewards",
    "system/step_time_s", "system/tokens_per_s", "system/mfu", "system/peak_memory_gib",
}  # fmt: skip
DETAILS = {
    "train/tokens", "train/experts/max_over_mean", "system/comm_gb_per_s/tp", "system/power_w", "system/ranks/busy_s",
    "system/ranks/busy_s/max", "system/ranks/wait_s/tp", "system/ranks/wait_s/tp/max",
}  # fmt: skip


@pytest.mark.parametrize(("field", "tags"), [("main", MAIN), ("all", MAIN | DETAILS)])
def test_metrics_are_grouped_and_few_unless_all_are_asked_for(run: RunDir, field: str, tags: set[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = load_job("tiny", [f"watch.tracker_metrics={field}"])
    sink = TrackerSink(run, job, "tensorboard", {"own": {"folder": str(run.path / field)}})
    sink.path = None
    sink.feed([RECORD], [])
    sink.finish(ended=True)
    found = EventAccumulator(str(run.path / field))
    found.Reload()
    assert set(found.Tags()["scalars"]) == tags
    assert found.Scalars("val/loss")[0].value == pytest.approx(2.1)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: LevelDB's log format (blocks of 32 KiB; checksum, length and type before each part)
    behind a header of 7 bytes."""
    assert data[:4] == b":W&B"
    place, parts = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_offline(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    export_to_tracker(run, load_job(str(run.job)), "wandb", None)
    (file,) = run.path.glob("wandb/offline-run-*/run-*.wandb")

    def records() -> list[Any]:
        return [Record.FromString(data) for data in wandb_records(file.read_bytes())]

    until(lambda: any(r.WhichOneof("record_type") == "exit" for r in records()))  # written by wandb's own process
    steps, kinds = [], set()
    for record in records():
        kinds.add(record.WhichOneof("record_type"))
        steps += [json.loads(i.value_json) for i in record.history.item if "train/loss" in (i.key, *i.nested_key)]
    assert steps == pytest.approx(losses(run))
    assert {"run", "history", "alert", "artifact", "exit"} <= kinds


def test_mlflow_continues_one_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for part in (records[:8], records[5:]):  # started twice
        sink = TrackerSink(run, load_job(str(run.job)), "mlflow")
        sink.feed(part, [{"event": "fault", "time": "2030", "step": 6, "why": "the loss is nan"}])
        sink.finish(ended=True)
    client = MlflowClient((run.path.parent / "mlruns").as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "weft"]
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [m.step for m in history] == STEPS and [m.value for m in history] == pytest.approx(losses(run))
    assert found.info.status == "FINISHED" and found.data.params["optim.name"] == "adamw"
    assert found.data.tags["alert.fault.step-6"] == "the loss is nan"
    assert [f.path for f in client.list_artifacts(found.info.run_id)] == ["report.html"]


def test_trackio(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio.sqlite_storage as storage

    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
    export_to_tracker(run, load_job(str(run.job)), "trackio", None)
    (name,) = storage.SQLiteStorage.get_runs("weft")
    logs = storage.SQLiteStorage.get_logs("weft", name)
    assert [entry["step"] for entry in logs] == STEPS
    assert [entry["train/loss"] for entry in logs] == pytest.approx(losses(run))
