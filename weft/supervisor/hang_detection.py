"""Detect hangs: how long no progress is normal is learned from the run's own steps and the machine's load."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

from weft.planner.plan import Plan
from weft.supervisor.status_board import Record

HANG_FACTOR = 8.0
"""A standstill this many times longer than any recent one is a hang."""
STEPS = ("data", "compute", "update")
KINDS = ("start", "spare", "unusable", "waiting", "connect", "checkpoint", "eval", "end", "gone")
"""The other phases; the first of these that a rank is in is the kind of a standstill."""
MIN_PHASE_TIMEOUT_S = 120.0
"""Shortest timeout of anything but a normal step: imports, compilation, evaluation, checkpoints."""
FIRST_PHASE_TIMEOUT_S = 600.0
"""Timeout of a phase that the run has not finished before."""
WARMUP_STEPS = 3
"""First steps of an attempt, which also load, compile and connect."""
MIN_WARMUP_TIMEOUT_S = 20.0
"""Shortest timeout of the first steps of an attempt, once an earlier attempt has finished its own."""
SAMPLE_INTERVAL_S = 0.15
BUSY_SHARE = 0.2
"""CPU share from which a process counts as working."""
BUSY_FACTOR = 20.0
"""Timeout multiplier while a rank that others wait for is working."""
MAX_LOAD = 20.0
"""Upper limit of the load factor."""
LOAD_UNIT_S, USUAL_DELAY_S = 0.06, 0.05
"""Poll delays: up to USUAL_DELAY_S is normal; every further LOAD_UNIT_S adds 1 to the load factor."""
STOP_WAIT_S, STOP_FACTOR = 5.0, 2.0
"""A run that was asked to stop waits for data so many seconds, or so many times its longest recent standstill."""
LOAD_DECAY = 0.6
"""Decay of the load factor per second."""
SUPERVISOR_SILENT_S = 30.0
"""How long the heartbeat of the supervisor may be missing. Its disk may be slow, and stacks of ranks take seconds."""


class HangDetector:
    """Polls the ranks' records and reports a standstill that has lasted too long.

    Steps, evaluations and other phases each have their own learned duration. `poll_s` is the time until the next
    poll: a late poll means an overloaded machine. `first_s` is the timeout of the first steps.
    """

    def __init__(
        self, floor_s: float, first_s: float, clock: Callable[[], float] = time.monotonic, poll_s: float = 0.02
    ):
        self.floor_s, self.first_s, self.clock, self.poll_s = floor_s, first_s, clock, poll_s
        self.gaps: dict[str, deque[float]] = {}
        self.load = 1.0
        """How many times slower than usual this machine is, from the delay of our own polls."""
        self.timeout_factor = 1.0
        """Timeout multiplier after attempts that committed no step."""
        self.new_attempt()

    def new_attempt(self) -> None:
        now = self._last = self.clock()  # no polls between attempts
        self._marks: dict[int, tuple[object, ...]] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._moved, self._sampled, self._first = now, now, -1
        self._stopped: dict[int, float] = {}
        self._used: dict[int, tuple[float, float]] = {}
        self._kind = "start"

    def check(self, ranks: dict[int, Record], awaited: Callable[[], Collection[int]] = tuple) -> float | None:
        """Seconds without progress, if they exceed the timeout.

        `awaited` returns the ranks that all others wait for, where they are known: only their work extends the timeout.
        A rank that waits for a GPU spins, which looks like work.
        """
        now = self.clock()
        since, self._last = now - self._last, now
        late = (USUAL_DELAY_S + max(0.0, since - self.poll_s)) / LOAD_UNIT_S
        self.load = min(MAX_LOAD, max(1.0, late, LOAD_DECAY**since * self.load))
        for rank, record in ranks.items():
            if self._beats.get(rank, (-1, 0.0))[0] != record.beats:
                self._beats[rank] = (record.beats, now)
        marks = {rank: record.mark for rank, record in ranks.items()}
        moved = max(self._moved, max(record.moved for record in ranks.values()) / 1e9 or now)  # before this poll
        if marks != self._marks:
            if self._marks:  # several changes may lie between two polls
                gap = moved - self._moved - max(0.0, self.poll_s - USUAL_DELAY_S)
                self.gaps.setdefault(self._kind, deque(maxlen=200)).append(max(0.0, gap))
            self._marks, self._moved, self._kind = marks, moved, self._kind_of(ranks)
            self._stopped, self._used = {}, {}
            return None
        still = now - self._moved
        if now - self._sampled > SAMPLE_INTERVAL_S:
            self._sampled = now
            seen = {rank: process_state(record.pid) for rank, record in ranks.items()}
            self._stopped = {r: self._stopped.get(r, now) for r, (state, _) in seen.items() if state == "T"}
            if not self._used:
                self._used = {r: (now, used) for r, (_, used) in seen.items()}
        if any(now - since > self.floor_s for since in self._stopped.values()):
            return still
        limit = self.limit(self._kind)
        if still > limit and any(self.silent(r) for r in ranks):
            return still
        if still <= limit:
            return None
        working = self._busy({r: ranks[r] for r in awaited() or ranks}, now)
        return still if not working or still > limit * BUSY_FACTOR else None

    @property
    def is_late(self) -> bool:
        """Whether the current standstill is longer than any recent one, so that polls should be more frequent."""
        return self.clock() - self._moved > max(self.gaps.get(self._kind, ()), default=0.0) + self.poll_s

    def stopped(self, rank: int) -> bool:
        """Whether a rank has been stopped by a signal for half of the minimum timeout."""
        return self.clock() - self._stopped.get(rank, self.clock()) > 0.5 * self.floor_s

    def silent(self, rank: int) -> bool:
        """Whether a rank's heartbeat has been missing for most of the standstill."""
        now = self.clock()
        return now - self._beats[rank][1] > max(1.0, 0.7 * (now - self._moved))

    def limit(self, kind: str) -> float:
        """Timeout of a kind of phase."""
        known = self.gaps.get(kind)
        if kind == "step":
            limit = self.load * max(self.floor_s, HANG_FACTOR * max(known or [0.0]))
        elif kind == "first":
            known = known if self.gaps.get("step") else None
            limit = min(self.first_s, self.load * max(MIN_WARMUP_TIMEOUT_S, HANG_FACTOR * max(known or [self.first_s])))
        else:
            limit = max(MIN_PHASE_TIMEOUT_S, HANG_FACTOR * max(known)) if known else FIRST_PHASE_TIMEOUT_S
        return min(self.timeout_factor * limit, max(limit, FIRST_PHASE_TIMEOUT_S))

    @property
    def delays_a_stop(self) -> bool:
        """Whether the current standstill is too long for a run that was asked to stop."""
        longest = max(self.gaps.get("step", ()), default=0.0)
        return self.clock() - self._moved > self.load * max(STOP_WAIT_S, STOP_FACTOR * longest)

    def awaits_nothing(self, ranks: dict[int, Record]) -> bool:
        """Whether none of these ranks works."""
        return not self._busy(ranks, self.clock())

    def regroup_timeout(self, floor_s: float, stopping: bool = False) -> float:
        """How long ranks may take to return after the attempt is over; some are computing. A run that is asked to stop
        does not wait longer after attempts without a step."""
        return (
            (1.0 if stopping else self.timeout_factor) * self.load * max(floor_s, 3 * max(self.gaps.get("step", [0.0])))
        )

    def _busy(self, ranks: dict[int, Record], now: float) -> bool:
        """Whether any rank is running, runnable, or waits for a disk."""
        for rank, record in ranks.items():
            state, used = process_state(record.pid)
            since, before = self._used.get(rank, (now, used))
            if state == "R" or (used - before) > BUSY_SHARE * (now - since) > 0 or waits_for_disk(record.pid):
                return True
        return False

    def _kind_of(self, ranks: dict[int, Record]) -> str:
        phases = {record.phase for record in ranks.values()}
        done = min(record.step for record in ranks.values())
        if phases <= set(STEPS):
            self._first = done if self._first < 0 else self._first
            return "step" if done >= self._first + WARMUP_STEPS else "first"
        return min(phases - set(STEPS), key=KINDS.index)


def first_steps_timeout_s(plan: Plan) -> float:
    """Timeout of the first steps of a plan."""
    return max(
        FIRST_PHASE_TIMEOUT_S if plan.compile else MIN_PHASE_TIMEOUT_S, 20 * plan.predicted.get("step_time_s", 0.0)
    )


class SupervisorWatch:
    """Finds that the supervisor is stopped or hangs, so that it is replaced. `problem` is called repeatedly."""

    def __init__(
        self,
        stopped_s: float,
        clock: Callable[[], float] = time.monotonic,
        state_of: Callable[[int], str] = lambda pid: process_state(pid)[0],
    ):
        """`stopped_s`: how long it may be stopped by a signal."""
        self.stopped_s, self.clock, self.state_of = stopped_s, clock, state_of
        self._pid, self._beats, self._moved = 0, 0, 0.0
        self._stopped: float | None = None

    def problem(self, pid: int, beats: int = 0) -> str:
        """Why the process has to be replaced, or empty. `beats`: its heartbeat so far; 0 before the first beat."""
        now = self.clock()
        if (pid, beats) != (self._pid, self._beats):
            self._pid, self._beats, self._moved, self._stopped = pid, beats, now, None
        if self.state_of(pid) != "T":
            self._stopped = None
        elif self._stopped is None:
            self._stopped = now
        if self._stopped is not None and now - self._stopped >= self.stopped_s:
            return "was stopped by a signal"
        return (
            f"did not respond for {SUPERVISOR_SILENT_S:g} s"
            if beats and now - self._moved > SUPERVISOR_SILENT_S
            else ""
        )


def waits_for_disk(pid: int) -> bool:
    """Whether a thread of a Linux process is in an uninterruptible wait, as when it reads from a slow file system."""
    try:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (OSError, IndexError):
        return False
    return "D" in states


def process_state(pid: int) -> tuple[str, float]:
    """State of a Linux process (R running, S sleeping, T stopped) and the CPU seconds it has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return "", 0.0
