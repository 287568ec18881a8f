"""Where this rank waits for others: the collective it is in, how many it entered, how long it waited on each axis.

A rank that is late to a collective waits in it the shortest; a rank that hangs is in none while the others wait. Guards
and the supervisor find slow and hung ranks by these counters, whatever the layout.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch.distributed as dist

from weft.comm.timeline import CommTimeline, cuda_event
from weft.comm.trace_ranges import StepRanges


class Meter:
    """One for each mesh. Counts only the training thread; checkpoints use a group of their own.

    On a GPU the host only enqueues collectives. There the waited time is that in which the compute stream is idle,
    measured by events that are read after they have passed, so that nothing synchronises.
    """

    __slots__ = ("_began", "_depth", "_marks", "axis", "cuda", "number", "ranges", "timeline", "waited", "watcher",
                 "what")  # fmt: skip

    def __init__(self, cuda: bool = False) -> None:
        self.cuda = cuda
        self.number = 0
        """Collectives entered so far: equal on all ranks that do the same work."""
        self.axis = ""
        """The axis this rank waits on now; empty while it computes."""
        self.what = ""
        self.waited: dict[str, float] = {}
        """Seconds inside collectives so far, by axis."""
        self.watcher: Callable[[Meter], None] | None = None
        """Called at every entry and exit."""
        self.timeline: CommTimeline | None = None
        """Records every message of a step whose communication is timed; None in other steps."""
        self.ranges: StepRanges | None = None
        """Names the parts of a traced step; None in other steps."""
        self._depth = 0
        self._began: Any = 0.0
        self._marks: deque[tuple[str, Any, Any]] = deque()

    def read(self) -> dict[str, float]:
        """Seconds waited so far, by axis; on a GPU up to the last event that has passed."""
        while self._marks and self._marks[0][2].query():
            axis, before, after = self._marks.popleft()
            self.waited[axis] = self.waited.get(axis, 0.0) + before.elapsed_time(after) / 1e3
        return dict(self.waited)

    def inside(self, axis: str, what: str) -> Inside:
        """A context around a wait for other ranks."""
        return Inside(self, axis, what)

    def blocking(self, axis: str, what: str) -> AbstractContextManager[None]:
        """A context around a collective that is complete when its call returns."""
        return self.inside(axis, what) if self.timeline is None else self._recorded(axis, what, self.timeline)

    @contextmanager
    def _recorded(self, axis: str, what: str, timeline: CommTimeline) -> Iterator[None]:
        with self.inside(axis, what), timeline.call(axis, what):
            yield

    def follow(self, work: Any, axis: str, what: str) -> dist.Work:
        """The work of a collective that was started, recorded in the timeline if there is one."""
        return work if self.timeline is None else self.timeline.follow(work, axis, what)

    def range(self, name: str) -> AbstractContextManager[None]:
        """A context around a part of a step, which a trace shows by this name."""
        return nullcontext() if self.ranges is None else self.ranges.range(name)

    def enter(self, axis: str, what: str) -> None:
        self._depth += 1
        if self._depth == 1:  # a collective may be composed of others
            self.number += 1
            self.axis, self.what = axis, what
            if self.watcher is not None:
                self.watcher(self)
            if self.ranges is not None:
                self.ranges.open_wait(axis, what)
            self._began = cuda_event() if self.cuda else time.perf_counter()

    def leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            axis = self.axis
            if self.ranges is not None:
                self.ranges.close_wait()
            if self.cuda:
                self._marks.append((axis, self._began, cuda_event()))
            else:
                self.waited[axis] = self.waited.get(axis, 0.0) + time.perf_counter() - self._began
            self.axis = self.what = ""
            if self.watcher is not None:
                self.watcher(self)


class Inside:
    """One wait inside a collective; may be entered later than it was made."""

    __slots__ = ("axis", "meter", "what")

    def __init__(self, meter: Meter, axis: str, what: str) -> None:
        self.meter, self.axis, self.what = meter, axis, what

    def __enter__(self) -> None:
        self.meter.enter(self.axis, self.what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.meter.leave()
