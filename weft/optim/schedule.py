"""The learning rate as a function of the step, and the built-in schedules."""

from __future__ import annotations

import math

from weft.job.optim import LR_SCHEDULES, LrSchedule, Optim
from weft.job.schema import Job
from weft.planner.lr_scaling import lr_scaling


def peak_lr(job: Job) -> tuple[float, str | None]:
    """The peak rate, scaled with the batch where the job asks for it, and a sentence for the log."""
    scaled = lr_scaling(job.optim, job.train.global_batch)
    return (job.optim.lr, None) if scaled is None else (scaled.lr, scaled.text)


def learning_rate(job: Job, step: int) -> float:
    """The rate of step 1, 2, … of train.steps."""
    o, total = job.optim, max(1, job.train.steps)
    scaled = lr_scaling(o, job.train.global_batch)
    peak, share = (o.lr, o.warmup) if scaled is None else (scaled.lr, scaled.warmup)
    warmup = round(share * total) if share < 1 else int(share)
    if step <= warmup:
        return peak * step / warmup
    return peak * LR_SCHEDULES[o.schedule].factor(o, step, warmup, total)


def _between(step: int, start: int, total: int) -> float:
    """How far a step is between start and the end, from 0 to 1."""
    return min(1.0, max(0.0, (step - start) / max(1, total - start)))


def _cosine(o: Optim, step: int, warmup: int, total: int) -> float:
    return o.min_lr + (1 - o.min_lr) * 0.5 * (1 + math.cos(math.pi * _between(step, warmup, total)))


def _linear(o: Optim, step: int, warmup: int, total: int) -> float:
    return o.min_lr + (1 - o.min_lr) * (1 - _between(step, warmup, total))


def _wsd(o: Optim, step: int, warmup: int, total: int) -> float:
    return _linear(o, step, max(warmup, total - round(o.decay * total)), total)


LR_SCHEDULES.register(LrSchedule("cosine", "Half a cosine from lr to min_lr.", _cosine))
LR_SCHEDULES.register(LrSchedule("linear", "A straight line from lr to min_lr.", _linear))
LR_SCHEDULES.register(LrSchedule("constant", "lr throughout.", lambda o, step, warmup, total: 1.0))
LR_SCHEDULES.register(LrSchedule("wsd", "Warm-up, stable, decay: lr, then a straight line to min_lr at the end.", _wsd))
