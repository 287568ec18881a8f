"""The learning rate as a function of the step: nothing to save, nothing to resume."""

from __future__ import annotations

import math

from weft.job.schema import Job


def peak_lr(job: Job) -> tuple[float, str | None]:
    """The peak rate, scaled with the batch where the job asks for it, and a sentence that says what was done."""
    o, batch = job.optim, job.train.global_batch
    if o.scale_lr == "none":
        return o.lr, None
    ratio = batch / o.base_batch
    factor = ratio if o.scale_lr == "linear" else math.sqrt(ratio)
    return o.lr * factor, (
        f"lr {o.lr:g} × {factor:.3g} = {o.lr * factor:.3g}: {o.scale_lr} scaling from batch {o.base_batch} to {batch}"
    )


def rate(job: Job, step: int) -> float:
    """The rate of step 1, 2, … of train.steps."""
    o, total = job.optim, max(1, job.train.steps)
    peak, _ = peak_lr(job)
    warmup = round(o.warmup * total) if o.warmup < 1 else int(o.warmup)
    if step <= warmup:
        return peak * step / warmup
    if o.schedule == "constant":
        return peak
    start = max(warmup, total - round(o.decay * total)) if o.schedule == "wsd" else warmup
    done = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if o.schedule == "cosine" else 1 - done
    return peak * (o.min_lr + (1 - o.min_lr) * shape)
