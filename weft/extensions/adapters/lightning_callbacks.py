"""Callbacks of Lightning that `weft.lightning.fit` knows, by the name of their class, and the hooks of your own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.job.errors import JobError

IGNORED = ("ModelSummary", "RichModelSummary", "TQDMProgressBar", "RichProgressBar", "DeviceStatsMonitor", "Timer")
"""Callbacks that show what Weft shows in its own way."""


class StopEarly:
    """EarlyStopping: ends the run when a metric has not improved for some evaluations."""

    def __init__(self, source: Any):
        self.monitor, self.patience = str(source.monitor), int(source.patience)
        self.sign = -1.0 if source.mode == "max" else 1.0
        self.delta, self.best, self.waited = abs(float(source.min_delta)), math.inf, 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self.monitor not in trainer.callback_metrics:
            known = ", ".join(trainer.callback_metrics) or "none"
            raise JobError(f"EarlyStopping monitors {self.monitor!r}, which was not logged; logged: {known}")
        value = self.sign * float(trainer.callback_metrics[self.monitor])
        if value < self.best - self.delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
            trainer.should_stop = trainer.should_stop or self.waited >= self.patience


class SaveCheckpoints:
    """ModelCheckpoint: a checkpoint after every epoch, or every some steps."""

    def __init__(self, source: Any):
        self.folder = Path(source.dirpath) if getattr(source, "dirpath", None) else None
        self.steps = int(getattr(source, "_every_n_train_steps", 0) or 0)

    def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
        if self.steps and trainer.global_step and trainer.global_step % self.steps == 0:
            trainer.save_checkpoint(self.folder)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if not self.steps:
            trainer.save_checkpoint(self.folder)


class LogRates:
    """LearningRateMonitor: the learning rate among the metrics."""

    def __init__(self, source: Any):
        self.source = source

    def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
        for optimizer in trainer.optimizers:
            trainer.logged_metrics[f"lr-{type(optimizer.optimizer).__name__}"] = optimizer.param_groups[0]["lr"]


KNOWN: dict[str, Callable[[Any], Any]] = {
    "EarlyStopping": StopEarly, "ModelCheckpoint": SaveCheckpoints, "LearningRateMonitor": LogRates,
}  # fmt: skip


def known_callbacks(callbacks: list[Any]) -> list[Any]:
    """What is called for each callback; Lightning's own that are not known are refused by name."""
    found = []
    for callback in callbacks:
        name, package = type(callback).__name__, type(callback).__module__.partition(".")[0]
        if name in KNOWN:
            found.append(KNOWN[name](callback))
        elif package not in ("lightning", "pytorch_lightning"):
            found.append(callback)
        elif name not in IGNORED:
            raise JobError(f"the callback {name} is not supported; {', '.join((*KNOWN, *IGNORED))} and your own are")
    return found
