"""Feeds a tracker with a run's records: every step once, also after a resume."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from weft.extensions.trackers.tags import is_main, tag_of
from weft.job.files.run_folder import RunDir
from weft.job.import_by_name import find_object
from weft.job.schema import Job
from weft.job.watch import TRACKERS
from weft.watch.journal import Journal, to_plain
from weft.watch.secret_values import without_secrets
from weft.watch.tracker_adapter import TrackedRun, TrackedStep, TrackerAdapter

STATE_FOLDER = "trackers"
NOT_LOGGED = ("step", "wall_time")
BAD_EVENTS = ("fault", "diverged", "failed", "alert")
STATUS_AFTER = {"done": "done", "stop": "stopped", "failed": "failed", "diverged": "failed", "start": "done"}
MAX_EARLY_EVENTS = 100
QUIET_EVENTS = ("eval", "checkpoint", "watch_failed")
"""Not sent: their figures are in the records, or they are about trackers."""


class TrackerSink:
    """One tracker. What it has received is kept in RUN/trackers/NAME.json."""

    def __init__(self, run: RunDir, job: Job, tracker: str, state: dict[str, Any] | None = None) -> None:
        self.name, self.run, self.job, self.tracker = f"tracker {tracker}", run, job, tracker
        self.path: Path | None = run.path / STATE_FOLDER / f"{tracker}.json"
        self.state = state
        self.adapter: TrackerAdapter | None = None
        self.early: list[dict[str, Any]] = []
        """Events before the first record."""
        self.status = "done"

    def start(self) -> None:
        """Nothing: the tracker is opened with the first record, so that a refused job leaves nothing there."""

    def feed(self, records: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        if self.adapter is None:
            self.early = [*self.early, *events][-MAX_EARLY_EVENTS:]
            if not records:
                return
            self._open()
            events = self.early
        assert self.adapter is not None and self.state is not None
        steps = []
        for record in records:
            entry = as_step(record, self.job.watch.tracker_metrics == "all")
            if entry is not None and entry.step > self.state["step"]:
                steps.append(entry)
                self.state["step"] = entry.step
        if steps:
            self.adapter.log(steps)
        for event in events:
            self._event(event)
        if steps or events:
            self._save()

    def finish(self, ended: bool) -> None:
        if self.adapter is not None:
            report = self.run.report if self.run.report.is_file() else None
            self.adapter.finish(self.status if ended else "failed", report)
            self._save()

    def _open(self) -> None:
        if self.state is None:
            assert self.path is not None
            try:
                self.state = json.loads(self.path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                self.state = {}
        assert self.state is not None
        self.state = {"step": -1, "events": "", "own": {}, **self.state}
        plan = json.loads(self.run.plan.read_text(encoding="utf-8")) if self.run.plan.is_file() else {}
        job = without_secrets(to_plain(self.job.model_dump()))
        tracked = TrackedRun(self.job.name, self.run.path, job, plan, self.state["own"])
        self.adapter = find_object(TRACKERS[self.tracker].builder, "watch.trackers")(tracked)

    def _event(self, event: dict[str, Any]) -> None:
        kind, at = str(event.get("event")), str(event.get("time") or "")
        assert self.state is not None and self.adapter is not None
        self.status = STATUS_AFTER.get(kind, self.status)
        if kind in QUIET_EVENTS or at <= self.state["events"]:
            return
        step = event.get("step")
        text = next((str(event[k]) for k in ("why", "message", "layout") if event.get(k)), kind)
        self.adapter.event(kind, text, step if isinstance(step, int) else None, kind in BAD_EVENTS)
        self.state["events"] = at

    def _save(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(self.state), encoding="utf-8")
        temporary.replace(self.path)


def as_step(record: dict[str, Any], every_metric: bool = True) -> TrackedStep | None:
    """The numbers of a record by their tags, all or the main ones; of a list of numbers the mean, and the largest as
    NAME/max."""
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    wall_time = record.get("wall_time")
    values: dict[str, float] = {}
    _collect(record, "", values)
    tags = {tag: value for key, value in values.items() if is_main(tag := tag_of(key)) or every_metric}
    return TrackedStep(step, float(wall_time) if isinstance(wall_time, int | float) else time.time(), tags)


def _collect(value: dict[str, Any], prefix: str, found: dict[str, float]) -> None:
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if name in NOT_LOGGED:
            continue
        if isinstance(inner, dict):
            _collect(inner, f"{name}.", found)
        elif isinstance(inner, int | float):
            found[name] = float(inner)
        elif isinstance(inner, list) and inner and all(isinstance(v, int | float) for v in inner):
            found[name] = math.fsum(inner) / len(inner)
            found[f"{name}.max"] = float(max(inner))


def export_to_tracker(run: RunDir, job: Job, tracker: str, folder: Path | None) -> tuple[int, str]:
    """Write a finished run to a tracker. Returns the number of steps and where they are."""
    from weft.watch.journal import read_jsonl, read_metrics

    state: dict[str, Any] = {"own": {"folder": str(folder)} if folder else {}}
    sink = TrackerSink(run, job, tracker, state)
    sink.path = None
    records = read_metrics(run.metrics)
    sink.feed(records, read_jsonl(run.events))
    sink.finish(ended=True)
    return len(records), str(state["own"].get("folder", tracker))


def tracker_sinks(run: RunDir, job: Job, journal: Journal, since: float) -> list[TrackerSink]:
    """One sink for each tracker of a job."""
    return [TrackerSink(run, job, name) for name in dict.fromkeys(job.watch.trackers)]
