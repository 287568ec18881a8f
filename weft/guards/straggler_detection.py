"""Straggler detection: each rank's compute time in a step, without waits, compared with the other ranks'.

On a busy machine any rank may be late for a second or two. Time spent waiting for a core while none was idle is
therefore excluded first; a rank that is late for much longer counts as slow in any case.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 8
"""Steps in a window."""
MIN_SPAN_S = 0.8
"""A window must span this time: a CPU quota stops a process for tenths of a second at a time."""
CONTENTION_SPAN_S = 6.0
"""Span of a window if CPU contention may be the cause."""
REBALANCE_SPAN_S = 2.0
"""Span of a window before work is rebalanced."""
REFINE_SPAN_S = 6.0
"""Span of a window before a division of work is corrected by little."""
MAX_STEPS = 2048
"""Steps that are kept."""
SLOW_RATIO = 1.5
"""Ratio to the other ranks' median from which a rank is slow."""
STEADY_RATIO = 1.2
"""Ratio required in both halves of the window, so that a single delay does not count."""
MIN_LOST_S = 0.015
"""Seconds lost in each step that are ignored."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes longer than the others."""

    rank: int
    ratio: float
    lost_s: float
    """In each step."""


@dataclass(frozen=True)
class StepTime:
    """A step: its duration, and for each rank compute time, wait for a core, and idle core time."""

    seconds: float
    busy: Sequence[float]
    delay: Sequence[float]
    idle: Sequence[float]


class RankTimes:
    """The recent steps of every rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.steps: deque[StepTime] = deque(maxlen=MAX_STEPS)
        self.forget()

    def add(
        self, seconds: float, busy: Sequence[float], delay: Sequence[float] = (), idle: Sequence[float] = ()
    ) -> None:
        """Add a step."""
        nothing = [0.0] * self.ranks
        self.steps.append(StepTime(seconds, busy, delay or nothing, idle or nothing))
        self.count += 1

    def forget(self) -> None:
        """Clear the history after work has moved."""
        self.steps.clear()
        self.count = 0
        self._judged: dict[float, tuple[int, SlowRank | None]] = {}
        """By span: the step count of the next check, and the last result."""

    def window(self, span_s: float) -> list[StepTime]:
        """The newest steps that fill a window, newest last; empty if there are too few."""
        found: list[StepTime] = []
        filled = 0.0
        for step in reversed(self.steps):
            found.append(step)
            filled += step.seconds
            if len(found) >= WINDOW and (filled >= span_s or len(found) == MAX_STEPS):
                return found[::-1]
        return []

    def typical(self, span_s: float = REBALANCE_SPAN_S) -> list[float]:
        """Each rank's compute time in a step; empty while unknown."""
        window = self.window(span_s)
        return [typical(window, rank) for rank in range(self.ranks)] if window else []

    def slow(self) -> SlowRank | None:
        """The slowest rank if it is slow: early without contention, later in any case."""
        return self._slow(MIN_SPAN_S, contention=False) or self._slow(CONTENTION_SPAN_S, contention=True)

    def _slow(self, span_s: float, contention: bool) -> SlowRank | None:
        again, found = self._judged.get(span_s, (0, None))
        if self.count < again or self.ranks < 2:
            return found
        window = self.window(span_s)
        found = find_slow_rank(window, self.ranks, contention) if window else None
        self._judged[span_s] = (
            self.count + max(1, len(window) // WINDOW),
            found,
        )  # with many short steps not after each
        return found


def find_slow_rank(window: Sequence[StepTime], ranks: int, contention: bool) -> SlowRank | None:
    """The slowest rank of a window if it is slow; `contention` includes waits for a core."""
    mine = [typical(window, rank) - (0.0 if contention else contention_s(window, rank)) for rank in range(ranks)]
    rank = max(range(ranks), key=lambda r: mine[r])
    ratio, lost = against(window, rank, ranks, contention)
    half = len(window) // 2
    steady = all(against(part, rank, ranks, contention)[0] > STEADY_RATIO for part in (window[:half], window[half:]))
    return SlowRank(rank, ratio, lost) if ratio > SLOW_RATIO and lost > MIN_LOST_S and steady else None


def typical(steps: Sequence[StepTime], rank: int) -> float:
    """A rank's mean without its longest step."""
    times = sorted(step.busy[rank] for step in steps)
    kept = times[:-1] or times
    return math.fsum(kept) / len(kept)


def contention_s(steps: Sequence[StepTime], rank: int) -> float:
    """Seconds a rank waited in each step because all cores were busy."""
    return max(0.0, math.fsum(s.delay[rank] for s in steps) - math.fsum(s.idle[rank] for s in steps)) / len(steps)


def against(steps: Sequence[StepTime], rank: int, ranks: int, contention: bool) -> tuple[float, float]:
    """A rank's ratio to the other ranks' median, and the difference."""
    others = statistics.median(typical(steps, r) for r in range(ranks) if r != rank)
    mine = typical(steps, rank) - (0.0 if contention else contention_s(steps, rank))
    return (mine / others if others > 0 else 1.0), mine - others
