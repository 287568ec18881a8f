"""Slow links: the communication time of a group compared with its usual time.

The last rank to enter a collective waits only for the transfer, so the shortest wait of a group is the time of its
links; a slow rank does not affect it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.guards.step_report import RankFigures

BASELINE_STEPS = 24
"""Steps from which the usual time is learned."""
RECENT_STEPS = 8
SLOW_RATIO = 2.0
"""Ratio to the usual time from which a link is slow."""
MIN_SHARE_LOST = 0.1
"""Share of a step's time that must be lost."""
MIN_LOST_S = 0.015
"""Seconds of a step that must be lost; a busy machine delays short messages."""


@dataclass
class LinkHistory:
    """Wait times of one group."""

    usual: deque[float] = field(default_factory=lambda: deque(maxlen=BASELINE_STEPS))
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    reported: bool = False


@dataclass(frozen=True)
class SlowLink:
    """A group whose communication became slow."""

    axis: str
    ranks: tuple[int, ...]
    usual_s: float
    now_s: float


def shortest_wait(rows: Sequence[RankFigures], axis: int) -> float:
    """The shortest wait of a group's ranks on an axis, without the time in which other processes had a rank's core."""
    contention = max(max(0.0, row.delay - row.idle) for row in rows)
    return max(0.0, min(row.waited[axis] for row in rows) - contention)


class SlowLinkDetector:
    """Wait times of every group, by axis and ranks."""

    def __init__(self) -> None:
        self.links: dict[tuple[str, tuple[int, ...]], LinkHistory] = {}

    def add(self, step_s: float, shortest: dict[tuple[str, tuple[int, ...]], float]) -> list[SlowLink]:
        """Add a step's shortest wait of each group; returns groups that became slow, each once."""
        found = []
        for key, seconds in shortest.items():
            link = self.links.setdefault(key, LinkHistory())
            if len(link.recent) == RECENT_STEPS:
                oldest = link.recent[0]
                if not link.reported:
                    link.usual.append(oldest)
            link.recent.append(seconds)
            if len(link.usual) < BASELINE_STEPS // 2:
                continue
            usual, now = statistics.median(link.usual), statistics.median(link.recent)
            slow = (
                now > SLOW_RATIO * usual
                and now - usual > max(MIN_LOST_S, MIN_SHARE_LOST * step_s)
                and min(link.recent) > SLOW_RATIO * usual
            )
            if slow and not link.reported:
                found.append(SlowLink(*key, usual, now))
            link.reported = slow or (link.reported and now > (1 + SLOW_RATIO) / 2 * usual)
        return found
