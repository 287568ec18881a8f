"""The time of one call on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def timed(
    work: Callable[[], object], device: torch.device, budget_s: float, rounds: int = 5,
    before_round: Callable[[], object] = lambda: None, slowest: Callable[[float], float] = lambda seconds: seconds,
) -> float:  # fmt: skip
    """Seconds of one call: the median of some rounds of many calls, in about `budget_s`.

    Ranks that work together wait for each other in `before_round`, and agree on the number of calls by the `slowest`.
    """

    def one_round(calls: int) -> float:
        before_round()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / calls

    one_round(1)
    calls = max(1, min(1000, int(budget_s / rounds / max(slowest(one_round(1)), 1e-7))))
    return statistics.median(one_round(calls) for _ in range(rounds))
