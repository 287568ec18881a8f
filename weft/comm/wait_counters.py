"""Where this rank waits for others: which collective it is in, how many it entered, how long it waited on each axis.

A rank that is late to a collective waits in it the shortest, and a rank that hangs is in none while the others wait:
who is to blame for a slow or a stuck step is read from here, whatever the layout.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch


class Meter:
    """One for each mesh. Only what the training thread does is counted; checkpoints talk on a group of their own.

    On a GPU the host only queues collectives: there the time is that in which the stream that computes stands still,
    taken by events and read when they have passed, so that nobody waits for them.
    """

    __slots__ = ("_began", "_depth", "_marks", "axis", "cuda", "number", "waited", "watcher", "what")

    def __init__(self, cuda: bool = False) -> None:
        self.cuda = cuda
        self.number = 0
        """Collectives entered so far: the same on every rank that does the same work."""
        self.axis = ""
        """The axis this rank waits on now; empty while it computes."""
        self.what = ""
        self.waited: dict[str, float] = {}
        """Seconds inside collectives so far, by axis."""
        self.watcher: Callable[[Meter], None] | None = None
        """Told at every entry and exit."""
        self._depth = 0
        self._began: Any = 0.0
        self._marks: deque[tuple[str, Any, Any]] = deque()

    def read(self) -> dict[str, float]:
        """Seconds waited so far, by axis; on a GPU as far as it has come."""
        while self._marks and self._marks[0][2].query():
            axis, before, after = self._marks.popleft()
            self.waited[axis] = self.waited.get(axis, 0.0) + before.elapsed_time(after) / 1e3
        return dict(self.waited)

    def inside(self, axis: str, what: str) -> Inside:
        """Around whatever blocks until other ranks have come."""
        return Inside(self, axis, what)

    def enter(self, axis: str, what: str) -> None:
        self._depth += 1
        if self._depth == 1:  # one collective may be made of others
            self.number += 1
            self.axis, self.what = axis, what
            if self.watcher is not None:
                self.watcher(self)
            self._began = _mark() if self.cuda else time.perf_counter()

    def leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            axis = self.axis
            if self.cuda:
                self._marks.append((axis, self._began, _mark()))
            else:
                self.waited[axis] = self.waited.get(axis, 0.0) + time.perf_counter() - self._began
            self.axis = self.what = ""
            if self.watcher is not None:
                self.watcher(self)


def _mark() -> Any:
    """A moment of the stream that computes."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Inside:
    """One stay in a collective; like a work under way it may be entered later than it was made."""

    __slots__ = ("axis", "meter", "what")

    def __init__(self, meter: Meter, axis: str, what: str) -> None:
        self.meter, self.axis, self.what = meter, axis, what

    def __enter__(self) -> None:
        self.meter.enter(self.axis, self.what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.meter.leave()
