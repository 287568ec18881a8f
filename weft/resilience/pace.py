"""Who is slow: the time each rank computes in a step, apart from what it waits for others, held against the others'."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 8
"""Steps that are looked at."""
SPAN_S = 0.8
"""They must also fill this time: a CPU quota stops a process for tenths of a second and then lets it run, and a busy
machine makes anyone late for as long."""
MOST = 512
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


class Pace:
    """The last steps of every rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.steps: deque[tuple[float, Sequence[float]]] = deque(maxlen=MOST)

    def add(self, seconds: float, busy: Sequence[float]) -> None:
        """A step: how long it took, and how much of it each rank computed."""
        self.steps.append((seconds, busy))

    def forget(self) -> None:
        """The work was divided anew: what was measured before says nothing about it."""
        self.steps.clear()

    def window(self) -> list[Sequence[float]]:
        """The newest steps that are enough to judge by, newest last; empty as long as there are not."""
        found: list[Sequence[float]] = []
        filled = 0.0
        for seconds, busy in reversed(self.steps):
            found.append(busy)
            filled += seconds
            if len(found) >= WINDOW and (filled >= SPAN_S or len(found) == MOST):
                return found[::-1]
        return []

    def typical(self) -> list[float]:
        """How long each rank computes in a step, by the window; empty as long as that is unknown."""
        window = self.window()
        return typical(window, self.ranks) if window else []

    def slow(self) -> Slow | None:
        """The slowest rank, if it is slow by any of the measures."""
        window = self.window()
        if not window or self.ranks < 2:
            return None
        times = typical(window, self.ranks)
        rank = max(range(self.ranks), key=lambda r: times[r])
        ratio, lost = against(times, rank)
        half = len(window) // 2
        steady = all(against(typical(part, self.ranks), rank)[0] > STEADY for part in (window[:half], window[half:]))
        return Slow(rank, ratio, lost) if ratio > SLOW and lost > LEAST_S and steady else None


def typical(steps: Sequence[Sequence[float]], ranks: int) -> list[float]:
    """Each rank's mean without its longest step, which may be an accident."""
    out = []
    for rank in range(ranks):
        times = sorted(busy[rank] for busy in steps)
        kept = times[:-1] or times
        out.append(math.fsum(kept) / len(kept))
    return out


def against(times: Sequence[float], rank: int) -> tuple[float, float]:
    """How many times as long as the others' median a rank takes, and how much longer."""
    others = statistics.median(t for r, t in enumerate(times) if r != rank)
    return (times[rank] / others if others > 0 else 1.0), times[rank] - others
