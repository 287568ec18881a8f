"""How long nothing may move before something is wrong: learned from the run's own pace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from weft.plan.layout import Plan
from weft.resilience.board import Record

FACTOR = 8.0
"""A standstill so many times longer than any of late is a fault."""
STEPS = ("data", "compute", "update")
SILENT_S = 30.0
"""Without a beat for so long a process is lost, whatever it does."""
FEW = 3
"""Steps of an attempt in which things are still loaded, compiled and connected."""
STOPPED_LOOK_S = 0.2


class Patience:
    """Looks at the ranks again and again, and says when a standstill has lasted too long.

    Steps, evaluations and the rest each have a pace of their own. Until it is known, `unknown_s` is waited.
    """

    def __init__(self, floor_s: float, plan: Plan, clock: Callable[[], float] = time.monotonic):
        self.floor_s, self.clock = floor_s, clock
        predicted = plan.predicted.get("step_time_s", 0.0)
        self.unknown_s = max(600.0 if plan.compile else 60.0, 20 * predicted)
        self.gaps: dict[str, deque[float]] = {}
        self.new_attempt()

    def new_attempt(self) -> None:
        now = self.clock()
        self._marks: dict[int, tuple[object, ...]] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._moved, self._looked, self._first = now, now, -1
        self._stopped: dict[int, float] = {}
        self._kind = "start"

    def look(self, ranks: dict[int, Record]) -> float | None:
        """Seconds of standstill, if they are too many."""
        now = self.clock()
        for rank, record in ranks.items():
            if self._beats.get(rank, (-1, 0.0))[0] != record.beats:
                self._beats[rank] = (record.beats, now)
        marks = {rank: record.mark for rank, record in ranks.items()}
        if marks != self._marks:
            if self._marks:
                self.gaps.setdefault(self._kind, deque(maxlen=200)).append(now - self._moved)
            self._marks, self._moved, self._kind = marks, now, self._kind_of(ranks)
            return None
        still = now - self._moved
        if now - self._looked > STOPPED_LOOK_S:
            self._looked = now
            self._stopped = {r: self._stopped.get(r, now) for r, record in ranks.items() if is_stopped(record.pid)}
        if any(now - since > self.floor_s for since in self._stopped.values()):
            return still
        if any(now - seen > SILENT_S for _, seen in self._beats.values()):
            return still
        return still if still > self.limit(self._kind) else None

    def silent(self, rank: int) -> bool:
        """Whether a rank's heart has not beaten for most of the standstill."""
        now = self.clock()
        return now - self._beats[rank][1] > max(0.5, 0.5 * (now - self._moved))

    def limit(self, kind: str) -> float:
        known = self.gaps.get(kind)
        if not known:
            return self.unknown_s if kind in (*STEPS, "first") else max(self.unknown_s, 600.0)
        learned = max(self.floor_s, FACTOR * max(known))
        return learned if kind == "step" else max(learned, 20.0)

    def to_return(self, floor_s: float) -> float:
        """How long ranks may take to come back when the attempt is over: some of them compute."""
        return max(floor_s, 3 * max(self.gaps.get("step", [0.0])))

    def _kind_of(self, ranks: dict[int, Record]) -> str:
        phases = {record.phase for record in ranks.values()}
        done = min(record.step for record in ranks.values())
        if phases <= set(STEPS):
            self._first = done if self._first < 0 else self._first
            return "step" if done >= self._first + FEW else "first"
        return next(
            p for p in ("start", "spare", "waiting", "connect", "checkpoint", "eval", "end", "gone") if p in phases
        )


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, as Linux tells it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
