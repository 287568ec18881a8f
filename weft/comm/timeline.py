"""When messages travelled in a step, and when this rank did nothing but wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

Moment = Any
"""Seconds on a CPU; on a GPU an event in the stream that was current, read when the step is over."""


class Spans:
    """What the axes of a mesh note of one step, for as long as they hold it.

    On a CPU a wait of the thread that trains is time in which it computed nothing. On a GPU the host never waits: what
    is measured is how long the stream stood still, and a message that FSDP2 sends in a stream of its own is seen to
    travel, but not whether it was waited for.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.thread = threading.get_ident()
        self.travelled: list[tuple[Moment, Moment]] = []
        self.blocked: list[tuple[Moment, Moment]] = []
        self.bytes, self.between, self.hidden = 0, 0, False
        self.began = self.now()

    def now(self) -> Moment:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, size: int, between: int) -> None:
        """Bytes that this rank hands over, and those of them that go to other nodes."""
        self.bytes += size
        self.between += between

    @contextmanager
    def call(self, waits: bool = True) -> Iterator[None]:
        """A message that is over when the call returns; `waits` says that the thread that trains waits for it."""
        began = self.now()
        yield
        ended = self.now()
        self.travelled.append((began, ended))
        if waits and self.thread == threading.get_ident():
            self.blocked.append((began, ended))
        self.hidden |= not waits

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait for messages that were begun before."""
        began = self.now()
        yield
        if self.thread == threading.get_ident():
            self.blocked.append((began, self.now()))

    def follow(self, work: dist.Work) -> Following:
        """A message that was begun: it travels until it is done, and is waited for when somebody does."""
        return Following(self, work)

    def figures(self, seconds: float) -> dict[str, float]:
        """Of a step of so many seconds: the shares, and the speed while something travelled."""
        if self.cuda:
            torch.cuda.synchronize()
        travelled = self._length(self.travelled)
        found = {"comm_share": min(1.0, travelled / seconds)} if seconds > 0 else {}
        if seconds > 0 and not (self.cuda and self.hidden):
            # only while something travelled: a thread that wakes late was not kept waiting by a message
            either = self._length([*self.travelled, *self.blocked])
            both = travelled + self._length(self.blocked) - either
            found["exposed_share"] = min(found["comm_share"], max(0.0, both) / seconds)
        found |= {"comm_mib": self.bytes / 2**20, "comm_between_mib": self.between / 2**20}
        if travelled > 0:
            found["comm_gb_per_s"] = self.bytes / travelled / 1e9
        return found

    def _length(self, spans: Iterable[tuple[Moment, Moment]]) -> float:
        """Seconds that at least one of them covers."""
        if self.cuda:
            spans = [(self.began.elapsed_time(a) / 1e3, self.began.elapsed_time(b) / 1e3) for a, b in spans]
        total, reached = 0.0, float("-inf")
        for start, end in sorted(spans):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total


Work: Any = dist.Work
"""FSDP2 waits only for what is one."""


class Following(Work):
    """A work whose end and whose wait are noted."""

    def __init__(self, spans: Spans, work: dist.Work):
        super().__init__()
        self.spans, self.work, self.began = spans, work, spans.now()
        self.ended: Moment = None
        if not spans.cuda:  # a GPU's message has ended when the stream goes on
            with suppress(RuntimeError):  # of Gloo's messages between two ranks nobody hears before he waits
                work.get_future().add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        self.ended = self.spans.now()

    def wait(self, timeout: Any = None) -> bool:
        with self.spans.waiting():
            self.work.wait() if timeout is None else self.work.wait(timeout)
        self.spans.travelled.append((self.began, self.ended if self.ended is not None else self.spans.now()))
        return True

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def get_future(self) -> Any:
        return self.work.get_future()
