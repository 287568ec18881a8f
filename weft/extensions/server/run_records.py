"""Metrics, events and progress of a server run, and the queue of states to evaluate or save."""

from __future__ import annotations

import logging
import math
import queue
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from weft.data.sample_order import Calendar
from weft.job.schema import Job
from weft.planner.model.counts import flops_per_sample
from weft.planner.model.reference_rate import mfu_peak_flops
from weft.planner.plan import Plan
from weft.training.metrics import unit_of_targets
from weft.watch.journal import Journal
from weft.watch.progress import Progress


@dataclass(frozen=True)
class StateCopy:
    """The run's state after a step, for an evaluation, a checkpoint, or both."""

    step: int
    tokens: int
    weights: dict[str, Tensor]
    """By checkpoint name; with optimizer state if `saves`."""
    evaluates: bool
    saves: bool
    sync: dict[str, Any]
    """The coordinator's own state."""


@dataclass
class RunRecords:
    """Writes what rank 0 writes in other runs. The caller holds the coordinator's lock."""

    job: Job
    plan: Plan
    journal: Journal
    progress: Progress
    log: logging.Logger
    calendar: Calendar
    copies: queue.SimpleQueue[StateCopy] = field(default_factory=queue.SimpleQueue)
    last: dict[str, Any] = field(default_factory=dict)
    step_times: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    recorded_bytes: int = 0
    """Bytes of traffic written to metrics so far."""

    def due_at(self, before: int, step: int) -> tuple[bool, bool]:
        """Whether an evaluation, and whether a checkpoint, is due in the steps (before, step]."""
        evaluate, save, calendar = self.job.train.eval_every, self.job.checkpoint.every, self.calendar
        if step <= before:
            return False, False
        return evaluate != 0 and calendar.due(evaluate, step, before), calendar.due(save, step, before)

    def lap(self, steps: int) -> float:
        """Seconds a step since the last call."""
        now = time.perf_counter()
        seconds, self.began = (now - self.began) / max(1, steps), now
        return seconds

    def step(self, number: int, loss: float, count: int, norm: float, lr: float, tokens: int, seconds: float,
             bytes_: int, **more: Any) -> None:  # fmt: skip
        """Write the record of a step."""
        sample, peak = flops_per_sample(self.job.model, self.job.data.seq_len), mfu_peak_flops(self.plan, self.job)
        flops = sample * self.job.train.global_batch if sample else None
        sent, self.recorded_bytes = bytes_ - self.recorded_bytes, bytes_
        self.last = {
            "step": number, "epoch": round(self.calendar.epochs(number), 6), "wall_time": round(time.time(), 3),
            "loss": loss, "grad_norm": norm, "lr": lr,
            "tokens": tokens, "step_time_s": seconds,
            "tokens_per_s": count / seconds if seconds > 0 else None,
            "mfu": flops / (seconds * peak * self.plan.world) if flops and peak else None,
            "sync_bytes": sent, **unit_of_targets(count, self.job.train.global_batch), **more,
        }  # fmt: skip
        self.step_times.append(seconds)
        self.journal.metrics(self.last)
        self.progress.update(self.last)

    def event(self, kind: str, note: str | None = None, **fields: Any) -> None:
        """Write an event, and a note on the console if given."""
        self.journal.event(kind, **fields)
        if note:
            self.progress.note(note)

    def finite(self, loss: float, norm: float) -> bool:
        return math.isfinite(loss) and math.isfinite(norm)
