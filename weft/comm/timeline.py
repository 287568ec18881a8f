"""When messages were under way in a step, and when this rank only waited for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

Moment = Any
"""Seconds on a CPU; on a GPU an event in the current stream, read after the step."""


def cuda_event() -> Any:
    """An event recorded now in the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class CommTimeline:
    """The messages and waits of one step.

    On a CPU a wait of the training thread is time without computation. On a GPU the host never waits: the time is that
    in which the stream is idle. Messages that FSDP2 sends in its own stream are recorded, waits for them are not.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.thread = threading.get_ident()
        self.messages: list[tuple[Moment, Moment]] = []
        self.waits: list[tuple[Moment, Moment]] = []
        self.bytes, self.between, self.hidden = 0, 0, False
        self.began = self.now()

    def now(self) -> Moment:
        return cuda_event() if self.cuda else time.perf_counter()

    def count(self, size: int, between: int) -> None:
        """Count sent bytes, and those of them sent to other nodes."""
        self.bytes += size
        self.between += between

    @contextmanager
    def call(self, waits: bool = True) -> Iterator[None]:
        """A message that is complete when the call returns; with `waits` the training thread waits for it."""
        began = self.now()
        yield
        ended = self.now()
        self.messages.append((began, ended))
        if waits and self.thread == threading.get_ident():
            self.waits.append((began, ended))
        self.hidden |= not waits

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait for messages that were started before."""
        began = self.now()
        yield
        if self.thread == threading.get_ident():
            self.waits.append((began, self.now()))

    def follow(self, work: dist.Work) -> FollowedWork:
        """A work that records its end and the wait for it."""
        return FollowedWork(self, work)

    def figures(self, seconds: float) -> dict[str, float]:
        """Share of communication and of exposed communication in a step of this length, and its speed."""
        if self.cuda:
            torch.cuda.synchronize()
        sending = self._length(self.messages)
        found = {"comm_share": min(1.0, sending / seconds)} if seconds > 0 else {}
        if seconds > 0 and not (self.cuda and self.hidden):
            # only while messages were under way: a thread that wakes late did not wait for a message
            either = self._length([*self.messages, *self.waits])
            both = sending + self._length(self.waits) - either
            found["exposed_share"] = min(found["comm_share"], max(0.0, both) / seconds)
        found |= {"comm_mib": self.bytes / 2**20, "comm_between_mib": self.between / 2**20}
        if sending > 0:
            found["comm_gb_per_s"] = self.bytes / sending / 1e9
        return found

    def _length(self, spans: Iterable[tuple[Moment, Moment]]) -> float:
        """Seconds covered by at least one of them."""
        if self.cuda:
            spans = [(self.began.elapsed_time(a) / 1e3, self.began.elapsed_time(b) / 1e3) for a, b in spans]
        total, reached = 0.0, float("-inf")
        for start, end in sorted(spans):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total


Work: Any = dist.Work
"""FSDP2 waits only for instances of this class."""


class FollowedWork(Work):
    """A work whose end and wait are recorded."""

    def __init__(self, timeline: CommTimeline, work: dist.Work):
        super().__init__()
        self.timeline, self.work, self.began = timeline, work, timeline.now()
        self.ended: Moment = None
        if not timeline.cuda:  # on a GPU a message has ended when the stream continues
            with suppress(RuntimeError):  # Gloo's point-to-point works have no future
                work.get_future().add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        self.ended = self.timeline.now()

    def wait(self, timeout: Any = None) -> bool:
        with self.timeline.waiting():
            self.work.wait() if timeout is None else self.work.wait(timeout)
        self.timeline.messages.append((self.began, self.ended if self.ended is not None else self.timeline.now()))
        return True

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def get_future(self) -> Any:
        return self.work.get_future()
