"""Named ranges of traced steps: in the profiler's trace, for Nsight (NVTX), and as spans of this process's clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.profiler import record_function

COMM = "weft.comm"
"""Prefix of a wait for other ranks: `weft.comm AXIS COLLECTIVE`."""


class RangeSpan(NamedTuple):
    """A range that has ended, in seconds of time.perf_counter()."""

    name: str
    start: float
    end: float


class StepRanges:
    """Opens ranges of the training thread, each closed before the one that contains it. Other threads are ignored."""

    def __init__(self, nvtx: bool, profiled: bool = True) -> None:
        """With `profiled` ranges are also marks in the profiler's trace, and `spans` are kept."""
        self.nvtx, self.profiled = nvtx, profiled
        self.thread = threading.get_ident()
        self.spans: list[RangeSpan] = []
        self._open: list[tuple[str, float, record_function | None]] = []

    def open_wait(self, axis: str, what: str) -> None:
        """Open the range of a wait for other ranks."""
        if threading.get_ident() == self.thread:
            self.open(f"{COMM} {axis} {what}")

    def close_wait(self) -> None:
        if threading.get_ident() == self.thread and self._open and self._open[-1][0].startswith(COMM):
            self.close()

    def open(self, name: str) -> None:
        mark = None
        if self.nvtx:
            torch.cuda.nvtx.range_push(name)
        if self.profiled:
            mark = record_function(name)
            mark.__enter__()
        self._open.append((name, time.perf_counter(), mark))

    def close(self) -> None:
        name, start, mark = self._open.pop()
        if mark is not None:
            self.spans.append(RangeSpan(name, start, time.perf_counter()))
            mark.__exit__(None, None, None)
        if self.nvtx:
            torch.cuda.nvtx.range_pop()

    def close_all(self) -> None:
        while self._open:
            self.close()

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        if threading.get_ident() != self.thread:
            yield
            return
        self.open(name)
        try:
            yield
        finally:
            self.close()
