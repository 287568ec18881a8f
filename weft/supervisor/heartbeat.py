"""What a process shows on the board while it works, and the thread that shows it alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from weft.supervisor.status_board import PHASES, Board

BEAT_S = 0.2
"""Between two beats, unless the bell rings: each takes Python's lock, and a core that the rank may need."""


class Fenced(Exception):
    """This rank belongs to an attempt that is over: it may commit nothing."""


class Pulse(Protocol):
    """What the loop tells of itself."""

    attempt: int

    def now(self, phase: str, step: int) -> None:
        """This phase begins, after so many steps."""

    def fence(self) -> None:
        """Raise Fenced if this attempt is over."""

    def committed(self, step: int) -> None:
        """A step's record is written."""


class Quiet:
    """The pulse of a run that nobody watches."""

    attempt = 1

    def now(self, phase: str, step: int) -> None: ...

    def fence(self) -> None: ...

    def committed(self, step: int) -> None: ...


class Heart:
    """A process's slot on the board. Its thread beats, so that a process which holds the GIL or is stopped shows, and
    waits for the slot's bell; `news` is set when that rings.

    `watch` is asked with every beat: collectives entered so far, the group it is in (0 for none), and the collectives
    begun in each group. `on_fence` is called once, in the thread, when the attempt that this process takes part in is
    over: it must wake up whoever waits for a rank that will not come.
    """

    def __init__(self, board: Board, slot: int):
        self.board, self.slot, self.attempt = board, slot, 0
        self.watch: Callable[[], tuple[int, int, list[int]]] = lambda: (0, 0, [])
        self.on_fence: Callable[[], None] = lambda: None
        self.news = threading.Event()
        self._words, self._phase, self._step = board.words, board.at(slot, "phase"), board.at(slot, "step")
        self._moved, self._bell = board.at(slot, "moved"), board.bell(str(slot))
        self._fenced = 0
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def join(self, attempt: int, rank: int) -> None:
        """Take part in an attempt."""
        self.board.put(self.slot, "rank", rank)
        self.board.put(self.slot, "committed", 0)
        self.board.put(self.slot, "attempt", attempt)
        self.attempt = attempt
        self.now("connect", 0)

    def now(self, phase: str, step: int) -> None:
        self._words[self._step] = step
        self._words[self._phase] = PHASES.index(phase)
        self._words[self._moved] = time.monotonic_ns()

    def fence(self) -> None:
        if not self.board.valid(self.attempt):
            raise Fenced(f"attempt {self.attempt} is over; this rank woke up too late and commits nothing")

    def committed(self, step: int) -> None:
        self.board.put(self.slot, "committed", step)
        self._words[self._moved] = time.monotonic_ns()

    def wait_for_news(self, seconds: float) -> None:
        """Until the bell has rung since the last time, or so long."""
        self.news.wait(seconds)
        self.news.clear()

    def _beat(self) -> None:
        board, slot, before = self.board, self.slot, (0, [0])
        while True:
            if self._bell.wait(BEAT_S):
                self.news.set()
            progress, inside, counts = self.watch()
            board.put(slot, "progress", progress)
            board.put(slot, "inside", inside)
            for group, count in enumerate(counts):
                board.count(slot, group, count)
            if (progress, counts) != before:
                before = (progress, counts)
                self._words[self._moved] = time.monotonic_ns()
            board.put(slot, "beats", board.get(slot, "beats") + 1)
            if self.attempt and self.attempt != self._fenced and not board.valid(self.attempt):
                self._fenced = self.attempt
                self.on_fence()
