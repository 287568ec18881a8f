"""The board: one small file in shared memory where every process of a run shows what it does, read from outside.

A head, and one record a slot; a slot is a place for one process, whatever its rank. All are 64-bit words that one
process writes and others read, without locks: a word is never half-written. The board outlives whoever wrote on it.
Words that somebody waits for ring that one's bell.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from weft.supervisor.wakeup import Bell

PHASES = ("gone", "start", "spare", "waiting", "connect", "data", "compute", "update", "eval", "checkpoint", "end")
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
    "guardian",
    "pause",
    "safe",
    "target",
)
HEAD = {name: i for i, name in enumerate(_HEAD)}
HEAD_WORDS = 16
LEASE = 15
"""The last word of the head, a float: until when (time.monotonic) anybody may commit."""
_SLOT = (
    "pid", "want", "deaths", "code", "attempt", "rank", "beats", "step", "phase", "committed", "progress", "inside",
    "moved",
)  # fmt: skip
SLOT = {name: i for i, name in enumerate(_SLOT)}
COUNTS = 16
"""In a record, the first of the words that count collectives, one a group of ranks."""
GROUPS = 12
SLOT_WORDS = COUNTS + GROUPS
MAGIC = 0x77656674_0002
WAITED_FOR = {"end": "guardian", "attempt": "slots", "published": "slots"}
"""By word of the head, who waits for it: `slots` are all processes that are ranks or may become some."""
WAITED_FOR_IN_SLOT = {"want": "guardian", "deaths": "supervisor"}
"""By word of a record."""


@dataclass(frozen=True)
class Record:
    """What one slot shows at one moment."""

    slot: int
    pid: int
    want: int
    deaths: int
    """Processes that have ended here."""
    code: int
    """How the last of them ended."""
    attempt: int
    rank: int
    beats: int
    step: int
    """Steps done."""
    phase: str
    committed: int
    """The newest step whose record is written."""
    progress: int
    """Collectives entered, of whatever group."""
    inside: int
    """The place among the counts of the group whose collective it is in, plus 1; 0 while it is in none."""
    moved: int
    """When it last showed something new, in nanoseconds of time.monotonic."""
    counts: tuple[int, ...]
    """Collectives begun, by group."""

    @property
    def mark(self) -> tuple[object, ...]:
        """What changes while something is being done."""
        return self.attempt, self.step, self.phase, self.progress, self.committed, self.counts


class Board:
    """The words of a board, by name."""

    def __init__(self, path: Path, slots: int | None = None):
        """Open the board at a path; with `slots`, make it."""
        self.path = path
        if slots is not None:
            size = 8 * (HEAD_WORDS + slots * SLOT_WORDS)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.truncate(handle, size)
        else:
            handle = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(handle, 0)
        finally:
            os.close(handle)
        self._bells: dict[str, Bell] = {}
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
        self._ring(WAITED_FOR.get(name))

    def bell(self, name: str) -> Bell:
        """The bell of the guardian, of the supervisor or of a slot, by its number."""
        if name not in self._bells:
            self._bells[name] = Bell(self.path.with_name(f"bell-{name}"))
        return self._bells[name]

    def _ring(self, who: str | None) -> None:
        if who is not None:
            with contextlib.suppress(OSError):  # the run is over and its folder gone: nobody waits
                for name in map(str, range(self.slots)) if who == "slots" else (who,):
                    self.bell(name).ring()

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
        """Whether what belongs to this attempt may still be committed."""
        return self["attempt"] == attempt and time.monotonic() < self.lease_until

    def at(self, slot: int, name: str) -> int:
        """The place of a word in `words`."""
        return HEAD_WORDS + slot * SLOT_WORDS + SLOT[name]

    @property
    def words(self) -> memoryview:
        return self._words

    def get(self, slot: int, name: str) -> int:
        return self._words[self.at(slot, name)]

    def put(self, slot: int, name: str, value: int) -> None:
        self._words[self.at(slot, name)] = value
        self._ring(WAITED_FOR_IN_SLOT.get(name))

    def count(self, slot: int, group: int, value: int) -> None:
        if group < GROUPS:
            self._words[HEAD_WORDS + slot * SLOT_WORDS + COUNTS + group] = value

    def clear(self, slot: int) -> None:
        """A new process begins here: nothing is known of it."""
        for name in ("attempt", "beats", "step", "committed", "progress", "inside", "moved"):
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
        for bell in self._bells.values():
            bell.close()
        self._words.release()
        self._floats.release()
        self._map.close()
