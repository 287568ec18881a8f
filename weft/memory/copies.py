"""Copies between device and host in the background: one queue for each direction, both at once.

On a GPU a queue is a stream that lives as long as the run; on CPU ranks it is a thread, so that the order of copies is
tested without a GPU. An event marks the end of a copy or a point of the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

Event = Any
"""torch.cuda.Event on GPUs, Future on CPU ranks."""
Pair = tuple[Tensor, Tensor]
"""Target and source."""


class Copies(Protocol):
    """Two queues of copies."""

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

    def fetch(self, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        return self._copy(self.inward, pairs, after)

    def store(self, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        return self._copy(self.outward, pairs, after)

    @staticmethod
    def _copy(stream: torch.cuda.Stream, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream().wait_event(event)

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

    def fetch(self, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        return self.inward.submit(self._copy, pairs, list(after))

    def store(self, pairs: Sequence[Pair], after: Iterable[Event]) -> Event:
        return self.outward.submit(self._copy, pairs, list(after))

    def _copy(self, pairs: Sequence[Pair], after: list[Future[None]]) -> None:
        for event in after:
            event.result()
        self.delay()
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)

    def wait(self, event: Event) -> None:
        event.result()

    def mark(self) -> Event:
        now: Future[None] = Future()
        now.set_result(None)
        return now

    def finish(self, event: Event) -> None:
        event.result()


def make_copies(device: torch.device) -> Copies:
    """The queues of a device."""
    return StreamCopies(device) if device.type == "cuda" else ThreadCopies()
