"""What the chief writes of a run while threads serve: metrics, events, progress; and what it leaves for later."""

from __future__ import annotations

import logging
import math
import queue
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from weft.job.schema import Job
from weft.planner.model.counts import flops_per_sample
from weft.planner.model.reference_rate import peak_flops
from weft.planner.plan import Plan
from weft.watch.journal import Journal
from weft.watch.progress import Progress


@dataclass(frozen=True)
class Copy:
    """The run as it was after a step: for an evaluation, a checkpoint, or both."""

    step: int
    tokens: int
    weights: dict[str, Tensor]
    """Under a checkpoint's names; with what else a checkpoint needs where `saves`."""
    evaluates: bool
    saves: bool
    sync: dict[str, Any]
    """What the desk needs to go on from here."""


@dataclass
class Book:
    """Rank 0's pen. Called by whoever holds the desk's lock."""

    job: Job
    plan: Plan
    journal: Journal
    progress: Progress
    log: logging.Logger
    copies: queue.SimpleQueue[Copy] = field(default_factory=queue.SimpleQueue)
    last: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    told: int = 0
    """Bytes said so far."""

    def due(self, before: int, step: int, every: int) -> bool:
        """Whether something that happens every so many steps, and after the last, falls into these."""
        return step > before and (step >= self.job.train.steps or (every > 0 and step // every > before // every))

    def lap(self, steps: int) -> float:
        """Seconds that each of the steps took that were made since the last lap."""
        now = time.perf_counter()
        seconds, self.began = (now - self.began) / max(1, steps), now
        return seconds

    def step(self, number: int, loss: float, count: int, norm: float, lr: float, tokens: int, seconds: float,
             bytes_: int, **more: Any) -> None:  # fmt: skip
        """A step's record."""
        sample, peak = flops_per_sample(self.job.model, self.job.data.seq_len), peak_flops(self.plan, self.job)
        flops = sample * self.job.train.global_batch if sample else None
        sent, self.told = bytes_ - self.told, bytes_
        self.last = {
            "step": number, "loss": loss, "grad_norm": norm, "lr": lr, "tokens": tokens, "step_time_s": seconds,
            "tokens_per_s": count / seconds if seconds > 0 else None,
            "mfu": flops / (seconds * peak * self.plan.world) if flops and peak else None,
            "sync_bytes": sent, **more,
        }  # fmt: skip
        self.journal.metrics(self.last)
        self.progress.update(self.last)

    def event(self, kind: str, note: str | None = None, **fields: Any) -> None:
        """A line in events.jsonl, and one on the console."""
        self.journal.event(kind, **fields)
        if note:
            self.progress.note(note)

    def finite(self, loss: float, norm: float) -> bool:
        return math.isfinite(loss) and math.isfinite(norm)
