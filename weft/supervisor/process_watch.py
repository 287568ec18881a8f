"""Find that the supervisor is stopped or hangs, so that it is replaced."""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.supervisor.hang_detection import process_state

SILENT_S = 30.0
"""How long a heartbeat may be missing. The disk may be slow, and reading the stacks of ranks takes seconds."""


class ProcessWatch:
    """Watches one process after the other; `problem` is called repeatedly."""

    def __init__(
        self,
        stopped_s: float,
        clock: Callable[[], float] = time.monotonic,
        state_of: Callable[[int], str] = lambda pid: process_state(pid)[0],
    ):
        """`stopped_s`: how long the process may be stopped by a signal."""
        self.stopped_s, self.clock, self.state_of = stopped_s, clock, state_of
        self._pid, self._beats, self._moved = 0, 0, 0.0
        self._stopped: float | None = None

    def problem(self, pid: int, beats: int = 0) -> str:
        """Why the process has to be replaced, or empty. `beats`: its heartbeat so far; 0 before the first beat."""
        now = self.clock()
        if (pid, beats) != (self._pid, self._beats):
            self._pid, self._beats, self._moved, self._stopped = pid, beats, now, None
        if self.state_of(pid) != "T":
            self._stopped = None
        elif self._stopped is None:
            self._stopped = now
        if self._stopped is not None and now - self._stopped >= self.stopped_s:
            return "was stopped by a signal"
        return f"did not respond for {SILENT_S:g} s" if beats and now - self._moved > SILENT_S else ""
