"""Progress that a process reports on the status board, and the heartbeat thread that shows it is alive."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from weft.supervisor.status_board import PHASES, StatusBoard

BEAT_INTERVAL_S = 0.2
"""Seconds between beats without a wake-up; each beat takes the GIL and some CPU of the rank."""


UNUSABLE_POLL_S = 1.0
"""Poll interval of a process that waits for the end of its attempt, without wake-ups."""


class Fenced(Exception):
    """Raised in a rank whose attempt is over; it must not commit anything."""


class Heartbeat(Protocol):
    """How the training loop reports progress."""

    attempt: int

    def now(self, phase: str, step: int) -> None:
        """Report the start of a phase after `step` completed steps."""

    def fence(self) -> None:
        """Raise Fenced if this attempt is over."""

    def committed(self, step: int) -> None:
        """Report that the record of a step has been written."""

    def may_finish_step(self, out_of_memory: bool) -> bool:
        """Whether the last complete step may be committed although the attempt has failed: if memory ran out, on this
        rank (`out_of_memory`) or on another, all ranks have computed that step."""


class NoHeartbeat:
    """Does nothing, for a run without a supervisor."""

    attempt = 1

    def now(self, phase: str, step: int) -> None: ...

    def fence(self) -> None: ...

    def committed(self, step: int) -> None: ...

    def may_finish_step(self, out_of_memory: bool) -> bool:
        return out_of_memory


class BoardHeartbeat:
    """Writes to a slot of the status board. A thread beats, so that a stopped process or a held GIL can be detected,
    and waits for the slot's wake-ups; `news` is set on each.

    `watch` is called on every beat and returns the collectives entered so far, the group of the current one (0 for
    none) and the collectives started in each group. `on_fence` is called once in the thread when the current attempt
    is over; it must interrupt ranks that wait for a lost peer.
    """

    def __init__(self, board: StatusBoard, slot: int):
        self.board, self.slot, self.attempt = board, slot, 0
        self.watch: Callable[[], tuple[int, int, list[int]]] = lambda: (0, 0, [])
        self.on_fence: Callable[[], None] = lambda: None
        self.news = threading.Event()
        self._words, self._phase, self._step = board.words, board.at(slot, "phase"), board.at(slot, "step")
        self._moved, self._wakeup = board.at(slot, "moved"), board.wakeup(str(slot))
        self._fenced = 0
        self._finishes = False
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def join(self, attempt: int, rank: int) -> None:
        """Join an attempt as a rank."""
        self.board.put(self.slot, "rank", rank)
        self.board.put(self.slot, "committed", 0)
        self.board.put(self.slot, "attempt", attempt)
        self.attempt, self._finishes = attempt, False
        self.now("connect", 0)

    def resumed(self, step: int) -> None:
        """Report that this attempt continues after `step` completed steps; called before its first training phase."""
        self.board.put(self.slot, "resumed", step)

    def now(self, phase: str, step: int) -> None:
        self._words[self._step] = step
        self._words[self._phase] = PHASES.index(phase)
        self._words[self._moved] = time.monotonic_ns()

    def fence(self) -> None:
        if not self._finishes and not self.board.valid(self.attempt):
            raise Fenced(f"attempt {self.attempt} is over; this rank must not commit")

    def committed(self, step: int) -> None:
        self.board.put(self.slot, "committed", step)
        self._words[self._moved] = time.monotonic_ns()

    def may_finish_step(self, out_of_memory: bool) -> bool:
        """On one machine, the next attempt begins only after this rank has left the current one; several nodes may
        continue without it."""
        board = self.board
        if out_of_memory:
            board["oom"] = self.attempt
        one_machine = math.isinf(board.lease_until) and board["published"] == self.attempt
        self._finishes = board["oom"] == self.attempt and (one_machine or board.valid(self.attempt))
        return self._finishes

    def wait_for_news(self, seconds: float) -> None:
        """Wait for a wake-up, at most so many seconds."""
        self.news.wait(seconds)
        self.news.clear()

    def leave_unconnected(self) -> None:
        """Report that this process has not connected in its attempt and can join no other, and wait until the attempt
        is over."""
        self.now("unusable", 0)
        while self.board["attempt"] == self.attempt:
            self.wait_for_news(UNUSABLE_POLL_S)

    def _beat(self) -> None:
        board, slot, before = self.board, self.slot, (0, [0])
        while True:
            if self._wakeup.wait(BEAT_INTERVAL_S):
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
