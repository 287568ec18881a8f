"""Who is slow: the time each rank computes in a step, apart from what it waits for others, held against the others'.

On a crowded machine anyone is late for a second or two. What a rank waited for a core while none was idle is therefore
left out of its own time, and only if it is late for much longer is it slow all the same.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 8
"""Steps that are looked at."""
SPAN_S = 0.8
"""They must also fill this time: a CPU quota stops a process for tenths of a second and then lets it run."""
CROWDED_S = 6.0
"""And this, where a crowd of processes may be the reason."""
SHARE_S = 2.0
"""And this, before work is divided by it."""
MOST = 2048
"""Steps that are kept, however short they are."""
SLOW = 1.5
"""A rank is slow when it computes this many times as long as the others."""
STEADY = 1.2
"""In the older and the newer half of the window alike: one hiccup is no slow rank."""
LEAST_S = 0.015
"""Time lost in each step, below which nobody cares."""


@dataclass(frozen=True)
class Slow:
    """A rank that computes longer than the others."""

    rank: int
    ratio: float
    lost_s: float
    """In each step."""


@dataclass(frozen=True)
class Took:
    """A step: how long it took, how much of it each rank computed and waited for a core, and what cores idled there."""

    seconds: float
    busy: Sequence[float]
    delay: Sequence[float]
    idle: Sequence[float]


class Pace:
    """The last steps of every rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.steps: deque[Took] = deque(maxlen=MOST)
        self.forget()

    def add(
        self, seconds: float, busy: Sequence[float], delay: Sequence[float] = (), idle: Sequence[float] = ()
    ) -> None:
        """One more step."""
        nothing = [0.0] * self.ranks
        self.steps.append(Took(seconds, busy, delay or nothing, idle or nothing))
        self.count += 1

    def forget(self) -> None:
        """The work was divided anew: what was measured before says nothing about it."""
        self.steps.clear()
        self.count = 0
        self._judged: dict[float, tuple[int, Slow | None]] = {}
        """By span: the step from which on it is judged again, and what was found."""

    def window(self, span_s: float) -> list[Took]:
        """The newest steps that are enough to judge by, newest last; empty as long as there are not."""
        found: list[Took] = []
        filled = 0.0
        for step in reversed(self.steps):
            found.append(step)
            filled += step.seconds
            if len(found) >= WINDOW and (filled >= span_s or len(found) == MOST):
                return found[::-1]
        return []

    def typical(self) -> list[float]:
        """How long each rank computes in a step; empty as long as that is unknown."""
        window = self.window(SHARE_S)
        return [typical(window, rank) for rank in range(self.ranks)] if window else []

    def slow(self) -> Slow | None:
        """The slowest rank, if it is slow by any of the measures: by its own doing soon, in a crowd only after long."""
        return self._slow(SPAN_S, crowd=False) or self._slow(CROWDED_S, crowd=True)

    def _slow(self, span_s: float, crowd: bool) -> Slow | None:
        again, found = self._judged.get(span_s, (0, None))
        if self.count < again or self.ranks < 2:
            return found
        window = self.window(span_s)
        found = judge(window, self.ranks, crowd) if window else None
        self._judged[span_s] = (self.count + max(1, len(window) // WINDOW), found)  # many short steps: now and then
        return found


def judge(window: Sequence[Took], ranks: int, crowd: bool) -> Slow | None:
    """The slowest rank of a window, if it is slow; `crowd`: no matter why."""
    mine = [typical(window, rank) - (0.0 if crowd else crowded(window, rank)) for rank in range(ranks)]
    rank = max(range(ranks), key=lambda r: mine[r])
    ratio, lost = against(window, rank, ranks, crowd)
    half = len(window) // 2
    steady = all(against(part, rank, ranks, crowd)[0] > STEADY for part in (window[:half], window[half:]))
    return Slow(rank, ratio, lost) if ratio > SLOW and lost > LEAST_S and steady else None


def typical(steps: Sequence[Took], rank: int) -> float:
    """A rank's mean without its longest step, which may be an accident."""
    times = sorted(step.busy[rank] for step in steps)
    kept = times[:-1] or times
    return math.fsum(kept) / len(kept)


def crowded(steps: Sequence[Took], rank: int) -> float:
    """What a rank waited in each step because there was no core for it."""
    return max(0.0, math.fsum(s.delay[rank] for s in steps) - math.fsum(s.idle[rank] for s in steps)) / len(steps)


def against(steps: Sequence[Took], rank: int, ranks: int, crowd: bool) -> tuple[float, float]:
    """How many times as long as the others' median a rank takes, and how much longer."""
    others = statistics.median(typical(steps, r) for r in range(ranks) if r != rank)
    mine = typical(steps, rank) - (0.0 if crowd else crowded(steps, rank))
    return (mine / others if others > 0 else 1.0), mine - others
