"""Trackio: its local store (TRACKIO_DIR), or the space of TRACKIO_SPACE_ID."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import trackio

from weft.watch.tracker_adapter import TrackedRun, TrackedStep, flat


class Trackio:
    """A run of the project TRACKIO_PROJECT, or weft; a resumed run continues it."""

    def __init__(self, run: TrackedRun) -> None:
        config = {k: v if isinstance(v, int | float | bool) else str(v) for k, v in flat(run.job).items()}
        config |= {f"plan.{k}": str(v) for k, v in run.plan.items()}
        # the store resumes by name: another run of the same name is not this one
        self.run = trackio.init(
            os.environ.get("TRACKIO_PROJECT", "weft"), config=config, resume="allow",
            name=run.state.setdefault("name", f"{run.name}-{secrets.token_hex(2)}"),
            space_id=os.environ.get("TRACKIO_SPACE_ID"), auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, steps: list[TrackedStep]) -> None:
        for entry in steps:
            self.run.log(entry.values, step=entry.step)

    def event(self, kind: str, text: str, step: int | None, bad: bool) -> None:
        if bad:
            self.run.alert(title=kind, text=text, level=trackio.AlertLevel.WARN, step=step)

    def finish(self, status: str, report: Path | None) -> None:
        if report is not None:
            self.run.log_artifact(str(report), name="report", type="report")
        self.run.finish()
