"""How long nothing may move before something is wrong: learned from the run's own pace, and from the machine's."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from weft.planner.plan import Plan
from weft.supervisor.status_board import Record

FACTOR = 8.0
"""A standstill so many times longer than any of late is a fault."""
STEPS = ("data", "compute", "update")
SLOW_S = 120.0
"""Shortest time that anything but a usual step is given: imports, compilation, evaluation, a slow disk."""
UNKNOWN_S = 600.0
"""The same, while the run has not done it yet."""
FEW = 3
"""Steps of an attempt in which things are still loaded, compiled and connected."""
SAMPLE_S = 0.15
BUSY = 0.2
"""A process that uses this share of a core works."""
WORKING = 20.0
"""So many times longer may a standstill last while somebody works."""
LATEST = 20.0
"""On an overloaded machine everything takes longer, up to so many times."""
LATE_S, USUAL_S = 0.06, 0.05
"""A look that is late by the difference is usual; by each of the first more, everything takes once more as long."""
FORGET = 0.6
"""What is left of a load after a second."""


class Patience:
    """Looks at the ranks again and again, and says when a standstill has lasted too long.

    Steps, evaluations and the rest each have a pace of their own. `looks_s` is the time until the next look: when it
    comes later, the machine has too much to do, and so have the ranks. `first_s` is what the first steps may take.
    """

    def __init__(
        self, floor_s: float, first_s: float, clock: Callable[[], float] = time.monotonic, looks_s: float = 0.02
    ):
        self.floor_s, self.first_s, self.clock, self.looks_s = floor_s, first_s, clock, looks_s
        self.gaps: dict[str, deque[float]] = {}
        self.load = 1.0
        """How many times slower than usual this machine is now, by our own lateness."""
        self.doubt = 1.0
        """So many times longer is waited after a standstill that came again at the same step."""
        self.new_attempt()

    def new_attempt(self) -> None:
        now = self._last = self.clock()  # between attempts nobody looks
        self._marks: dict[int, tuple[object, ...]] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._moved, self._sampled, self._first = now, now, -1
        self._stopped: dict[int, float] = {}
        self._used: dict[int, tuple[float, float]] = {}
        self._kind = "start"

    def look(self, ranks: dict[int, Record]) -> float | None:
        """Seconds of standstill, if they are too many."""
        now = self.clock()
        since, self._last = now - self._last, now
        late = (USUAL_S + max(0.0, since - self.looks_s)) / LATE_S
        self.load = min(LATEST, max(1.0, late, FORGET**since * self.load))
        for rank, record in ranks.items():
            if self._beats.get(rank, (-1, 0.0))[0] != record.beats:
                self._beats[rank] = (record.beats, now)
        marks = {rank: record.mark for rank, record in ranks.items()}
        moved = max(self._moved, max(record.moved for record in ranks.values()) / 1e9 or now)  # a look comes later
        if marks != self._marks:
            if self._marks:  # several moves may lie between two looks that are far apart
                gap = moved - self._moved - max(0.0, self.looks_s - USUAL_S)
                self.gaps.setdefault(self._kind, deque(maxlen=200)).append(max(0.0, gap))
            self._marks, self._moved, self._kind = marks, moved, self._kind_of(ranks)
            self._stopped, self._used = {}, {}
            return None
        still = now - self._moved
        if now - self._sampled > SAMPLE_S:
            self._sampled = now
            seen = {rank: state_of(record.pid) for rank, record in ranks.items()}
            self._stopped = {r: self._stopped.get(r, now) for r, (state, _) in seen.items() if state == "T"}
            if not self._used:
                self._used = {r: (now, used) for r, (_, used) in seen.items()}
        if any(now - since > self.floor_s for since in self._stopped.values()):
            return still
        limit = self.limit(self._kind)
        if still > limit and any(self.silent(r) for r in ranks):
            return still
        return still if still > limit * (WORKING if self._busy(ranks, now) else 1.0) else None

    @property
    def uneasy(self) -> bool:
        """Whether nothing has moved for longer than ever of late: time to look more closely."""
        return self.clock() - self._moved > max(self.gaps.get(self._kind, ()), default=0.0) + self.looks_s

    def stopped(self, rank: int) -> bool:
        """Whether a rank has been stopped by a signal for a while: who is stopped and let go again is only slow."""
        return self.clock() - self._stopped.get(rank, self.clock()) > 0.5 * self.floor_s

    def silent(self, rank: int) -> bool:
        """Whether a rank's heart has not beaten for most of the standstill."""
        now = self.clock()
        return now - self._beats[rank][1] > max(1.0, 0.7 * (now - self._moved))

    def limit(self, kind: str) -> float:
        known = self.gaps.get(kind)
        if kind == "step":
            return self.doubt * self.load * max(self.floor_s, FACTOR * max(known or [0.0]))
        usual = self.first_s if kind == "first" else UNKNOWN_S
        return max(SLOW_S, FACTOR * max(known)) if known and kind != "first" else usual

    def to_return(self, floor_s: float) -> float:
        """How long ranks may take to come back when the attempt is over: some of them compute."""
        return self.load * max(floor_s, 3 * max(self.gaps.get("step", [0.0])))

    def _busy(self, ranks: dict[int, Record], now: float) -> bool:
        """Whether somebody works, or would if there were a core for it."""
        for rank, record in ranks.items():
            state, used = state_of(record.pid)
            since, before = self._used.get(rank, (now, used))
            if state == "R" or (used - before) > BUSY * (now - since) > 0:
                return True
        return False

    def _kind_of(self, ranks: dict[int, Record]) -> str:
        phases = {record.phase for record in ranks.values()}
        done = min(record.step for record in ranks.values())
        if phases <= set(STEPS):
            self._first = done if self._first < 0 else self._first
            return "step" if done >= self._first + FEW else "first"
        return next(
            p for p in ("start", "spare", "waiting", "connect", "checkpoint", "eval", "end", "gone") if p in phases
        )


def first_steps_s(plan: Plan) -> float:
    """How long the first steps of a plan may stand still."""
    return max(UNKNOWN_S if plan.compile else SLOW_S, 20 * plan.predicted.get("step_time_s", 0.0))


def state_of(pid: int) -> tuple[str, float]:
    """What Linux tells of a process: R runs or wants to, S waits, T is stopped by a signal; and seconds of CPU used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return "", 0.0
