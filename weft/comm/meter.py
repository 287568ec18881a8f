"""Where this rank waits for others: which collective it is in, how many it entered, how long it waited on each axis.

A rank that is late to a collective waits in it the shortest, and a rank that hangs is in none while the others wait:
who is to blame for a slow or a stuck step is read from here, whatever the layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType


class Meter:
    """One for each mesh. Only what the training thread does is counted; checkpoints talk on a group of their own."""

    __slots__ = ("_began", "_depth", "axis", "number", "waited", "watcher", "what")

    def __init__(self) -> None:
        self.number = 0
        """Collectives entered so far: the same on every rank that does the same work."""
        self.axis = ""
        """The axis this rank waits on now; empty while it computes."""
        self.what = ""
        self.waited: dict[str, float] = {}
        """Seconds inside collectives so far, by axis. On a GPU only what the host waited."""
        self.watcher: Callable[[Meter], None] | None = None
        """Told at every entry and exit."""
        self._depth, self._began = 0, 0.0

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
            self._began = time.perf_counter()

    def leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            axis = self.axis
            self.waited[axis] = self.waited.get(axis, 0.0) + time.perf_counter() - self._began
            self.axis = self.what = ""
            if self.watcher is not None:
                self.watcher(self)


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
