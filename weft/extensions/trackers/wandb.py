"""Weights & Biases: online with an API key, else offline in RUN/wandb (`wandb sync` uploads it)."""

from __future__ import annotations

import contextlib
import netrc
import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

import wandb

from weft.watch.tracker_adapter import TrackedRun, TrackedStep

PROJECT_VARIABLE, MODE_VARIABLE = "WANDB_PROJECT", "WANDB_MODE"
EXIT_CODES = {"done": 0, "stopped": 0, "failed": 1}


def has_key() -> bool:
    """Whether `wandb login` or the environment has given an API key."""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        if netrc.netrc().authenticators(host) is not None:
            return True
    return bool(os.environ.get("WANDB_API_KEY"))


class Wandb:
    """A run of W&B with the id of its first start, so that a resumed run continues its curves."""

    def __init__(self, run: TrackedRun) -> None:
        mode = os.environ.get(MODE_VARIABLE)
        if mode is None and not has_key():
            mode = "offline"
        self.run = wandb.init(
            project=os.environ.get(PROJECT_VARIABLE, "weft"), name=run.name, dir=str(run.folder), resume="allow",
            id=run.state.setdefault("id", secrets.token_hex(6)), config={**run.job, "plan": run.plan}, mode=mode,
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True,
                                    save_code=False),
        )  # fmt: skip
        run.state["folder"] = str(self.run.dir)

    def log(self, steps: list[TrackedStep]) -> None:
        for entry in steps:
            self.run.log(entry.values, step=entry.step)

    def event(self, kind: str, text: str, step: int | None, bad: bool) -> None:
        where = "" if step is None else f" at step {step}"
        if bad:
            self.run.alert(title=f"{kind}{where}", text=text, level=wandb.AlertLevel.WARN, wait_duration=0)
        self.run.summary[f"events/{kind}"] = f"{text}{where}"

    def finish(self, status: str, report: Path | None) -> None:
        if report is not None:
            artifact = wandb.Artifact(f"report-{self.run.id}", type="report")
            artifact.add_file(str(report))
            self.run.log_artifact(artifact)
        self.run.finish(exit_code=EXIT_CODES[status])
