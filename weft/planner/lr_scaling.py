"""Rules that scale the learning rate, and the warm-up, with the global batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.job.optim import Optim

MAX_WARMUP = 0.5
"""Longest warm-up that scaling gives, as a fraction of all steps."""


@dataclass(frozen=True)
class LrScaling:
    """The peak learning rate and the warm-up of a batch, and a sentence on both."""

    lr: float
    warmup: float
    text: str


def lr_scaling(optim: Optim, batch: int) -> LrScaling | None:
    """What optim.scale_lr changes for a global batch; None without it.

    `lars` is the rule for lars and lamb (You et al. 2019): the rate grows with the square root of the batch, and the
    epochs of warm-up with the batch. A warm-up in steps then stays, and a fraction of the steps grows.
    """
    if optim.scale_lr == "none":
        return None
    ratio = batch / optim.base_batch
    factor, warmup = ratio if optim.scale_lr == "linear" else math.sqrt(ratio), optim.warmup
    text = f"lr {optim.lr:g} × {factor:.3g} = {optim.lr * factor:.3g}: {optim.scale_lr} scaling from batch "
    text += f"{optim.base_batch} to {batch}"
    if optim.scale_lr == "lars":
        if 0 < warmup < 1:
            warmup = min(warmup * ratio, max(warmup, MAX_WARMUP))
            text += f"; warm-up {optim.warmup:.3g} → {warmup:.3g} of the steps"
        else:
            text += f"; warm-up of {warmup:g} steps as before"
    return LrScaling(optim.lr * factor, warmup, text)
