"""The status board: a small file in shared memory in which every process of a run shows its state.

It has a header and one record a slot; a slot holds one process, whatever its rank. All fields are 64-bit words written
by one process and read by others without locks. The board outlives its writers. Writing certain words wakes the
process that waits for them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from weft.supervisor.memory_folder import allocate
from weft.supervisor.wakeup import Wakeup

PHASES = (
    "gone",
    "start",
    "spare",
    "waiting",
    "unusable",
    "connect",
    "data",
    "compute",
    "update",
    "eval",
    "checkpoint",
    "end",
)
LEFT_ATTEMPT = ("waiting", "unusable")
"""Phases of a rank that has left its attempt: it can join the next one, or exits as soon as its attempt is over."""
TRAINING = PHASES[PHASES.index("data") :]
"""Phases of a rank that has a session."""

_HEAD = (
    "magic",
    "slots",
    "attempt",
    "published",
    "end",
    "first_step",
    "supervisor",
    "manager",
    "pause",
    "safe",
    "target",
    "oom",
    "stop",
    "supervisor_beats",
    "asked",  # the attempt whose ranks are asked to save and stop, so that nodes can join
)
HEAD = {name: i for i, name in enumerate(_HEAD)}
HEAD_WORDS = 16
LEASE = 15
"""Index of the header's float word: until when (time.monotonic) ranks may commit."""
_SLOT = (
    "pid", "want", "deaths", "code", "attempt", "rank", "beats", "step", "phase", "committed", "progress", "inside",
    "moved", "resumed",
)  # fmt: skip
SLOT = {name: i for i, name in enumerate(_SLOT)}
COUNTS = 16
"""Index in a record of the first collective counter, one a group of ranks."""
GROUPS = 12
SLOT_WORDS = COUNTS + GROUPS
MAGIC = 0x77656674_0004
WAITED_FOR = {"end": "manager", "attempt": "slots", "published": "slots"}
"""Header words that wake a process when written; `slots` wakes all ranks and spares."""
WAITED_FOR_IN_SLOT = {"want": "manager", "deaths": "supervisor"}
"""Record words that wake a process when written."""


@dataclass(frozen=True)
class Record:
    """The state of one slot at one moment."""

    slot: int
    pid: int
    want: int
    deaths: int
    """Processes that have exited in this slot."""
    code: int
    """Exit code of the last of them."""
    attempt: int
    rank: int
    beats: int
    step: int
    """Completed steps."""
    phase: str
    committed: int
    """The newest step whose record is written."""
    progress: int
    """Collectives entered, in any group."""
    inside: int
    """1 + the group index of the current collective; 0 outside collectives."""
    moved: int
    """When anything last changed, in nanoseconds of time.monotonic."""
    resumed: int
    """Completed steps when this attempt began."""
    counts: tuple[int, ...]
    """Collectives started, by group."""

    @property
    def mark(self) -> tuple[object, ...]:
        """Values that change while the process makes progress."""
        return self.attempt, self.step, self.phase, self.progress, self.committed, self.counts


class StatusBoard:
    """A mapped status board."""

    def __init__(self, path: Path, slots: int | None = None):
        """Open the board at a path; with `slots`, create it."""
        self.path = path
        if slots is not None:
            allocate(path, 8 * (HEAD_WORDS + slots * SLOT_WORDS))
        handle = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(handle, 0)
        finally:
            os.close(handle)
        self._wakeups: dict[str, Wakeup] = {}
        self._words = memoryview(self._map).cast("q")
        self._floats = memoryview(self._map).cast("d")
        if slots is not None:
            self._words[0], self._words[1] = MAGIC, slots
            self._floats[LEASE] = float("inf")
        if self._words[0] != MAGIC:
            raise ValueError(f"{path} is no board")

    def __getitem__(self, name: str) -> int:
        return self._words[HEAD[name]]

    def __setitem__(self, name: str, value: int) -> None:
        self._words[HEAD[name]] = value
        self._notify(WAITED_FOR.get(name))

    def wakeup(self, name: str) -> Wakeup:
        """The wake-up of the manager, the supervisor, or a slot (by its number)."""
        if name not in self._wakeups:
            self._wakeups[name] = Wakeup(self.path.with_name(f"wakeup-{name}"))
        return self._wakeups[name]

    def _notify(self, target: str | None) -> None:
        if target is not None:
            with contextlib.suppress(OSError):  # the run is over and its folder removed
                for name in map(str, range(self.slots)) if target == "slots" else (target,):
                    self.wakeup(name).notify()

    @property
    def slots(self) -> int:
        return self["slots"]

    @property
    def lease_until(self) -> float:
        return self._floats[LEASE]

    @lease_until.setter
    def lease_until(self, value: float) -> None:
        self._floats[LEASE] = value

    def valid(self, attempt: int) -> bool:
        """Whether ranks of this attempt may still commit."""
        return self["attempt"] == attempt and time.monotonic() < self.lease_until

    def at(self, slot: int, name: str) -> int:
        """Index of a slot's word in `words`."""
        return HEAD_WORDS + slot * SLOT_WORDS + SLOT[name]

    @property
    def words(self) -> memoryview:
        return self._words

    def get(self, slot: int, name: str) -> int:
        return self._words[self.at(slot, name)]

    def put(self, slot: int, name: str, value: int) -> None:
        self._words[self.at(slot, name)] = value
        self._notify(WAITED_FOR_IN_SLOT.get(name))

    def count(self, slot: int, group: int, value: int) -> None:
        if group < GROUPS:
            self._words[HEAD_WORDS + slot * SLOT_WORDS + COUNTS + group] = value

    def clear(self, slot: int) -> None:
        """Reset the record for a new process."""
        for name in ("attempt", "beats", "step", "committed", "progress", "inside", "moved", "resumed"):
            self.put(slot, name, 0)
        self.put(slot, "rank", -1)
        self.put(slot, "phase", PHASES.index("start"))
        for group in range(GROUPS):
            self.count(slot, group, 0)

    def record(self, slot: int) -> Record:
        first = HEAD_WORDS + slot * SLOT_WORDS
        words = self._words[first : first + SLOT_WORDS].tolist()
        fields = {name: words[i] for name, i in SLOT.items()}
        phase = PHASES[fields.pop("phase")]
        return Record(slot=slot, phase=phase, counts=tuple(words[COUNTS:]), **fields)

    def records(self) -> list[Record]:
        return [self.record(slot) for slot in range(self.slots)]

    def close(self) -> None:
        for wakeup in self._wakeups.values():
            wakeup.close()
        self._words.release()
        self._floats.release()
        self._map.close()
