"""The time of one call on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

ROUNDS = 5


def timed(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Seconds of one call: the median of five rounds of many calls, in about `budget_s`."""

    def one_round(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / calls

    one_round(1)
    calls = max(1, min(1000, int(budget_s / ROUNDS / max(one_round(1), 1e-7))))
    return statistics.median(one_round(calls) for _ in range(ROUNDS))
