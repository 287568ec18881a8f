"""When messages were under way in a step, and when this rank only waited for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Moment = Any
"""Seconds on a CPU; on a GPU an event in the current stream, read after the step."""


LARGE_BYTES = 1 << 16
"""Bytes from which the time of a message shows the bandwidth of its link."""


def cuda_event() -> Any:
    """An event recorded now in the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class SentMessage:
    """A message from its start to its end, with the bytes that this rank sent."""

    axis: str
    what: str
    bytes: int
    start: Moment
    end: Moment


class CommTimeline:
    """The messages and waits of one step.

    On a CPU a wait of the training thread is time without computation. On a GPU the host never waits: the time is that
    in which the stream is idle. Messages that FSDP2 sends in its own stream are recorded, waits for them are not.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.thread = threading.get_ident()
        self.messages: list[SentMessage] = []
        self.waits: list[tuple[Moment, Moment]] = []
        self.bytes, self.between, self.hidden = 0, 0, False
        self._counted = 0
        self._counted_at: float | None = None
        self.began = self.now()

    def now(self) -> Moment:
        return cuda_event() if self.cuda else time.perf_counter()

    def count(self, size: int, between: int) -> None:
        """Count sent bytes, and those of them sent to other nodes."""
        if not self.cuda and self._counted_at is None:
            self._counted_at = time.perf_counter()
        self.bytes += size
        self.between += between

    def started(self) -> tuple[int, Moment]:
        """Bytes counted since the last message was started, and when it starts: on a CPU, when they were counted."""
        counted, began = self.bytes - self._counted, self._counted_at
        self._counted, self._counted_at = self.bytes, None
        return counted, self.now() if began is None else began

    @contextmanager
    def call(self, axis: str, what: str, waits: bool = True) -> Iterator[None]:
        """A message that is complete when the call returns; with `waits` the training thread waits for it."""
        counted, began = self.started()
        yield
        ended = self.now()
        self.messages.append(SentMessage(axis, what, counted, began, ended))
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

    def follow(self, work: dist.Work, axis: str, what: str) -> FollowedWork:
        """A work that records its end and the wait for it."""
        return FollowedWork(self, work, axis, what)

    def figures(self, seconds: float) -> dict[str, float]:
        """Share of communication and of exposed communication in a step of this length, and its speed."""
        if self.cuda:
            torch.cuda.synchronize()
        spans = [(message.start, message.end) for message in self.messages]
        sending = self._length(spans)
        found = {"comm_share": min(1.0, sending / seconds)} if seconds > 0 else {}
        if seconds > 0 and not (self.cuda and self.hidden):
            # only while messages were under way: a thread that wakes late did not wait for a message
            either = self._length([*spans, *self.waits])
            both = sending + self._length(self.waits) - either
            found["exposed_share"] = min(found["comm_share"], max(0.0, both) / seconds)
        found |= {"comm_mib": self.bytes / 2**20, "comm_between_mib": self.between / 2**20}
        if sending > 0:
            found["comm_gb_per_s"] = self.bytes / sending / 1e9
        return found

    def axes(self) -> dict[str, dict[str, float]]:
        """Messages by axis: MiB sent, bandwidth while one is under way, that of the fastest large one, and the shortest
        time of any. The fastest ones show the link: others also wait for ranks that arrive later."""
        out: dict[str, dict[str, float]] = {}
        for axis in {message.axis: None for message in self.messages}:
            mine = [m for m in self.messages if m.axis == axis]
            took = [self._length([(m.start, m.end)]) for m in mine]
            sending, sent = self._length([(m.start, m.end) for m in mine]), sum(m.bytes for m in mine)
            rates = [m.bytes / t / 1e9 for m, t in zip(mine, took, strict=True) if m.bytes >= LARGE_BYTES and t > 0]
            out[axis] = {"messages": len(mine), "mib": round(sent / 2**20, 4), "shortest_ms": round(1e3 * min(took), 4)}
            if sending > 0:
                out[axis]["gb_per_s"] = round(sent / sending / 1e9, 5)
            if rates:
                out[axis]["best_gb_per_s"] = round(max(rates), 5)
        return out

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

    def __init__(self, timeline: CommTimeline, work: dist.Work, axis: str, what: str):
        super().__init__()
        self.timeline, self.work = timeline, work
        counted, began = timeline.started()
        self.message = SentMessage(axis, what, counted, began, began)
        self.ended: Moment = None
        if not timeline.cuda:  # on a GPU a message has ended when the stream continues
            with suppress(RuntimeError):  # Gloo's point-to-point works have no future
                work.get_future().add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        self.ended = self.timeline.now()

    def wait(self, timeout: Any = None) -> bool:
        with self.timeline.waiting():
            self.work.wait() if timeout is None else self.work.wait(timeout)
        self.message.end = self.ended if self.ended is not None else self.timeline.now()
        self.timeline.messages.append(self.message)
        return True

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def get_future(self) -> Any:
        return self.work.get_future()
