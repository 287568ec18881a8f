"""What a process shows on the board while it works, and the thread that shows it alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from weft.resilience.board import PHASES, Board

BEAT_S = 0.05


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
    """A process's slot on the board. Its thread beats, so that a process which holds the GIL or is stopped shows.

    `watch` is asked with every beat: collectives entered so far, the group it is in (0 for none), and the collectives
    begun in each group. `on_fence` is called once, in the thread, when the attempt that this process takes part in is
    over: it must wake up whoever waits for a rank that will not come.
    """

    def __init__(self, board: Board, slot: int):
        self.board, self.slot, self.attempt = board, slot, 0
        self.watch: Callable[[], tuple[int, int, list[int]]] = lambda: (0, 0, [])
        self.on_fence: Callable[[], None] = lambda: None
        self._words, self._phase, self._step = board.words, board.at(slot, "phase"), board.at(slot, "step")
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

    def fence(self) -> None:
        if not self.board.valid(self.attempt):
            raise Fenced(f"attempt {self.attempt} is over; this rank woke up too late and commits nothing")

    def committed(self, step: int) -> None:
        self.board.put(self.slot, "committed", step)

    def _beat(self) -> None:
        pause = threading.Event()
        board, slot = self.board, self.slot
        while not pause.wait(BEAT_S):
            progress, inside, counts = self.watch()
            board.put(slot, "progress", progress)
            board.put(slot, "inside", inside)
            for group, count in enumerate(counts):
                board.count(slot, group, count)
            board.put(slot, "beats", board.get(slot, "beats") + 1)
            if self.attempt and self.attempt != self._fenced and not board.valid(self.attempt):
                self._fenced = self.attempt
                self.on_fence()
