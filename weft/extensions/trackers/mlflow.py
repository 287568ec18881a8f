"""MLflow: the server of MLFLOW_TRACKING_URI, or files in RUNS/mlruns."""

from __future__ import annotations

import os
import time
from itertools import islice
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from weft.watch.tracker_adapter import TrackedRun, TrackedStep, flat

BATCH = 1000
"""Metrics that MLflow takes at once."""
PARAMETERS = 100
MAX_TEXT = 5000
STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Mlflow:
    """A run of the experiment MLFLOW_EXPERIMENT_NAME, or weft; a resumed run continues it."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        default = (run.folder.parent / "mlruns").resolve().as_uri()
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", default))
        self.id = str(run.state.get("id", ""))
        if self.id:
            self.client.update_run(self.id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "weft")
        experiment = self.client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment else self.client.create_experiment(name)
        self.id = run.state["id"] = self.client.create_run(where, run_name=run.name).info.run_id
        parameters = iter(flat({**run.job, "plan": run.plan}).items())
        while part := [Param(k, str(v)[:MAX_TEXT]) for k, v in islice(parameters, PARAMETERS)]:
            self.client.log_batch(self.id, params=part)

    def log(self, steps: list[TrackedStep]) -> None:
        metrics = (Metric(k, v, int(1000 * s.wall_time), s.step) for s in steps for k, v in s.values.items())
        while part := list(islice(metrics, BATCH)):
            self.client.log_batch(self.id, metrics=part)

    def event(self, kind: str, text: str, step: int | None, bad: bool) -> None:
        at = "" if step is None else f".step-{step}"
        name = f"{'alert' if bad else 'event'}.{kind}{at}"
        self.client.log_batch(self.id, tags=[RunTag(name[:250], text[:MAX_TEXT])])

    def finish(self, status: str, report: Path | None) -> None:
        if report is not None:
            self.client.log_artifact(self.id, str(report))
        try:
            self.client.set_terminated(self.id, STATUS[status], int(1000 * time.time()))
        except MlflowException as error:
            raise OSError(f"the run could not be ended: {error}") from error
