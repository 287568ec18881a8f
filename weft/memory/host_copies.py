"""Copies between device and host in the background: one queue for each direction, both at once.

On a GPU a queue is a stream that lives as long as the run; on CPU ranks it is a thread, so that the order of copies is
tested without a GPU. An event marks the end of a copy or a point of the computation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Event = Any
"""torch.cuda.Event on GPUs, Future on CPU ranks."""
Pair = tuple[Tensor, Tensor]
"""Target and source."""


@dataclass
class CopySeconds:
    """How long copies took, and how long the computation waited for them."""

    fetch: float = 0.0
    store: float = 0.0
    waited: float = 0.0

    def __add__(self, other: CopySeconds) -> CopySeconds:
        return CopySeconds(self.fetch + other.fetch, self.store + other.store, self.waited + other.waited)

    @property
    def hidden(self) -> float:
        """Share of the copying that ran beside the computation."""
        busiest = max(self.fetch, self.store)
        return max(0.0, 1.0 - self.waited / busiest) if busiest else 1.0


class Copies(Protocol):
    """Two queues of copies."""

    seconds: CopySeconds

    def fetch(self, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        """Copy to the device once these events have happened."""

    def store(self, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        """Copy from the device once these events have happened."""

    def wait(self, event: Event) -> None:
        """Make the computation wait for an event."""

    def mark(self) -> Event:
        """An event at this point of the computation."""

    def finish(self, event: Event) -> None:
        """Wait on the host for an event."""


class StreamCopies:
    """Copies on two CUDA streams."""

    def __init__(self, device: torch.device):
        self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.seconds = CopySeconds()
        self.timed: deque[tuple[str, Event, Event]] = deque()
        """Begin and end of what is not counted in `seconds` yet."""

    def fetch(self, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        return self._copy("fetch", self.inward, pairs, after)

    def store(self, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        return self._copy("store", self.outward, pairs, after)

    def _copy(self, kind: str, stream: torch.cuda.Stream, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        for event in after:
            stream.wait_event(event)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        end.record(stream)
        self._count(kind, begin, end)
        return end

    def _count(self, kind: str, begin: Event, end: Event) -> None:
        self.timed.append((kind, begin, end))
        while self.timed and self.timed[0][2].query():
            kind, begin, end = self.timed.popleft()
            seconds = begin.elapsed_time(end) / 1e3
            setattr(self.seconds, kind, getattr(self.seconds, kind) + seconds)

    def wait(self, event: Event) -> None:
        stream = torch.cuda.current_stream()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        stream.wait_event(event)
        end.record(stream)
        self._count("waited", begin, end)

    def mark(self) -> Event:
        return torch.cuda.current_stream().record_event()

    def finish(self, event: Event) -> None:
        event.synchronize()


class ThreadCopies:
    """The same for CPU ranks, with a thread for each direction. `delay` is called before each copy."""

    def __init__(self, delay: Callable[[], None] = lambda: None):
        self.inward = ThreadPoolExecutor(1, thread_name_prefix="weft-fetch")
        self.outward = ThreadPoolExecutor(1, thread_name_prefix="weft-store")
        self.delay = delay
        self.seconds = CopySeconds()

    def fetch(self, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        return self.inward.submit(self._copy, "fetch", pairs, list(after))

    def store(self, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        return self.outward.submit(self._copy, "store", pairs, list(after))

    def _copy(self, kind: str, pairs: Sequence[Pair], after: list[Future[None]]) -> None:
        for event in after:
            event.result()
        self.delay()
        began = time.perf_counter()
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)
        # one thread writes each field
        setattr(self.seconds, kind, getattr(self.seconds, kind) + time.perf_counter() - began)

    def wait(self, event: Event) -> None:
        began = time.perf_counter()
        event.result()
        self.seconds.waited += time.perf_counter() - began

    def mark(self) -> Event:
        now: Future[None] = Future()
        now.set_result(None)
        return now

    def finish(self, event: Event) -> None:
        event.result()


def make_copies(device: torch.device) -> Copies:
    """The queues of a device."""
    return StreamCopies(device) if device.type == "cuda" else ThreadCopies()
