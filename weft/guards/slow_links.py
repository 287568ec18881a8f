"""Slow links: the time that the ranks of one axis must wait for one another's messages, against what the run learned.

Whoever comes last to a collective waits only for the messages themselves, so the shortest wait in a group is the time
of its links, and a slow rank does not lengthen it.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

LEARN = 24
"""Steps from which the usual time of a group's messages is learned, and learned anew as the run goes on."""
RECENT = 8
SLOW = 2.0
"""Times as long as usual."""
LEAST = 0.1
"""Of the time of a step, what must be lost before it is told."""
LEAST_S = 0.015
"""And in seconds: a busy machine makes short messages late."""


@dataclass
class Link:
    """One group of one axis."""

    usual: deque[float] = field(default_factory=lambda: deque(maxlen=LEARN))
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    told: bool = False


@dataclass(frozen=True)
class SlowLink:
    """A group whose messages take longer than they did."""

    axis: str
    ranks: tuple[int, ...]
    usual_s: float
    now_s: float


class Links:
    """What is known of every group's messages, by axis and ranks."""

    def __init__(self) -> None:
        self.links: dict[tuple[str, tuple[int, ...]], Link] = {}

    def add(self, step_s: float, shortest: dict[tuple[str, tuple[int, ...]], float]) -> list[SlowLink]:
        """Take in a step's shortest wait of every group; returns those that have become slow, each once."""
        found = []
        for key, seconds in shortest.items():
            link = self.links.setdefault(key, Link())
            if len(link.recent) == RECENT:
                oldest = link.recent[0]
                if not link.told:
                    link.usual.append(oldest)
            link.recent.append(seconds)
            if len(link.usual) < LEARN // 2:
                continue
            usual, now = statistics.median(link.usual), statistics.median(link.recent)
            slow = now > SLOW * usual and now - usual > max(LEAST_S, LEAST * step_s) and min(link.recent) > SLOW * usual
            if slow and not link.told:
                found.append(SlowLink(*key, usual, now))
            link.told = slow or (link.told and now > (1 + SLOW) / 2 * usual)
        return found
