"""The shapes of bench/gpu.py, and the timer for the steps of other trainers."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WARMUP_STEPS = 4
"""Warm-up steps, which are not counted."""


@dataclass(frozen=True)
class Shape:
    """A Llama and its batch."""

    dim: int
    layers: int
    heads: int
    kv: int
    ffn: int
    vocab: int
    seq: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def flops_per_token(self) -> float:
        """Six for each multiplied weight, and causal attention once; without norms and embedding."""
        head = self.dim // self.heads
        block = 2 * self.dim * self.dim + 2 * self.dim * self.kv * head + 3 * self.dim * self.ffn
        return 6.0 * (self.layers * block + self.vocab * self.dim) + 6.0 * self.layers * self.dim * self.seq


SHAPES = {
    "1b": Shape(2048, 16, 32, 8, 8192, 128256, 8192, 2),
    "3b": Shape(3072, 28, 24, 8, 8192, 128256, 8192, 1),
    "tiny": Shape(256, 2, 4, 2, 1024, 1024, 256, 2),
}


def report(times: list[float], began: float, first: float) -> None:
    """Step times, process start and end of the first step, as one line for bench/gpu.py."""
    import torch

    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    found = {"step_time_s": statistics.median(times[WARMUP_STEPS:]), "peak_gib": peak, "first_step_s": first - began}
    print("RESULT " + json.dumps(found), flush=True)


class Clock:
    """Times steps from idle device to idle device."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.began = float(os.environ.get("BENCH_BEGAN", time.time()))
        self.first = 0.0

    def __call__(self, step: Callable[[], Any]) -> None:
        self._wait()
        began = time.perf_counter()
        step()
        self._wait()
        self.times.append(time.perf_counter() - began)
        self.first = self.first or time.time()

    def report(self) -> None:
        report(self.times, self.began, self.first)

    @staticmethod
    def _wait() -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
