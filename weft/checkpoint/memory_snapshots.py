"""The newest steps of one rank, kept in shared memory: files that outlive the process that wrote them.

Each of a ring of files holds one step: a head, a table of the tensors with a little JSON, then the tensors' bytes. A
step is first copied, some of it only when the next update is near, and sealed when it is committed: the number of the
step in the head is written last, so what a killed process left half-written is no snapshot at all.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from weft.checkpoint.snapshot_storage import Making, Slot, Table

KEEP = 6
"""Steps in the ring. While one is written, the ranks may differ by one in the newest that they have sealed; the rest
is for going back before a bad batch, and to the last step that is known to be good."""

FEWEST = 3
"""With less than this no step is sure to be whole on every rank."""

SHARE = 0.25
"""Share of the free host memory that the snapshots of all ranks of a machine may take."""

KEEP_ALONE = 2
"""Copies of a large state of a single rank: a complete one, and one being written; only one if two do not fit."""

COST = 0.0075
"""Of the time of a step, what copying may take on average: a larger state is copied every few steps."""

FREE_S = 0.002
"""Copying that takes less than this is done at every step, however short."""

AGREE_AFTER, AGREE_EVERY = KEEP + 2, 200
"""Steps after which ranks agree how often to copy: soon after a start, when all of the ring has been written once (the
first time takes longer), and then now and then."""

AT_ONCE = 1 << 28
"""Bytes of a ring that is made before the first copy; of a larger one a CPU rank makes one file for each of its first
copies, and a GPU's is made beside the run."""

BESIDE = 0.9
"""Of the time of a step, how long a GPU may copy beside it and hold up nobody: until the next update."""

BYTES_PER_S = {"cuda": 20e9, "cpu": 3e9}
"""Of copies, before one was measured."""


def newest_common(held: Iterable[Iterable[int]], at_most: int | None = None) -> int | None:
    """The newest step that every rank has whole."""
    sets = [set(steps) for steps in held]
    common = set.intersection(*sets) if sets else set()
    return max((s for s in common if at_most is None or s <= at_most), default=None)


class Snapshots:
    """The ring of one rank. Without a folder it is ordinary memory, which serves for going back but not for outliving.

    `local_ranks` share the machine's memory. `refused` says why nothing is kept, where that is so.
    """

    def __init__(
        self, folder: Path | None, rank: int, local_ranks: int = 1, keep: int = KEEP,
        device: torch.device = torch.device("cpu"), world: int = 2,
    ):  # fmt: skip
        self.fewest, self.summary = FEWEST if world > 1 else 1, ""
        self.folder, self.rank, self.local_ranks, self.keep, self.device = folder, rank, local_ranks, keep, device
        self.refused = ""
        self.background = device.type == "cuda"
        """Whether the ring is made, and steps are copied, beside the run."""
        self.every = AGREE_AFTER if self.background else 1
        """Steps between two of them, the same on all ranks."""
        self._slots: list[Slot] = []
        self.wanted: Callable[[], tuple[int, int]] = lambda: (-1, 0)
        """The step that other machines hold copies of, and the one from which on the next is copied (0: none)."""
        self.trusted = -1
        """The last step that is known to be good: the newest up to it stays."""
        self._open: tuple[Slot, int, dict[str, Any]] | None = None
        self._committed = -1
        self._copies: deque[float] = deque(maxlen=8)
        self._steps: deque[float] = deque(maxlen=2 * AGREE_AFTER)
        self._last: tuple[int, float] | None = None
        self._making: Making | None = None
        self._size = 0
        self._complete = False
        """Whether the ring was filled up: of what a process before this one left, only whole steps are taken over."""
        if folder is not None:
            paths = [self._path(i) for i in range(keep)]
            self._slots = [slot for path in paths if path and (slot := Slot.found(path)) is not None]

    def _path(self, number: int) -> Path | None:
        return None if self.folder is None else self.folder / f"snap-{self.rank}.{number}"

    def due(self, step: int) -> bool:
        return not self.refused and step % self.every == 0

    def take(self, step: int, shards: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
        """Copy this rank's shards as they are now; what only an update changes, by settle(). It counts once it is
        sealed."""
        kinds = {slot.table.text: slot for slot in self._slots}  # most often all are alike, and one stands for them
        if not all(slot.fits(shards) for slot in kinds.values()):
            self._slots, self._complete = [], False
        if not self._complete:
            self._fill_up(shards)
        pinned = self._pinned()
        slot = min((s for s in self._slots if s.sealed not in pinned), key=lambda s: s.sealed, default=None)
        if slot is None:  # refused, or still being made
            return
        slot.write(shards)
        self._open = (slot, step, meta)
        if step <= self._committed:
            self.seal(step, {})

    def _pinned(self) -> set[int]:
        """What must not be overwritten yet: copies elsewhere are of use only beside the same step here."""
        safe, target = self.wanted()
        held = self.held()
        sent = [s for s in held if s >= target > 0]
        pinned = {s for s in (safe, *sent[:1]) if s > 0}
        good = [s for s in held if s <= self.trusted][-1:]
        return pinned.union(good) if len(self._slots) - len(pinned.intersection(held).union(good)) >= FEWEST else pinned

    def seal(self, step: int, more: dict[str, Any]) -> None:
        """The step is committed: what was copied of it may be continued from."""
        self._committed = step
        if self._open is not None and self._open[1] == step:
            slot, _, meta = self._open
            slot.seal(step, meta | more)
            self._copies.append(slot.copy_s)
            self._open = None

    def settle(self) -> None:
        """Whatever changes the state from here on waits for what is still being copied of it."""
        if self._open is not None:
            self._open[0].settle()

    def drop(self) -> None:
        """The state goes elsewhere: what was copied of the newest step will not be committed."""
        if self._open is not None:
            self._open[0].forget()
            self._open = None

    def held(self) -> list[int]:
        """The steps that are whole here."""
        return sorted(slot.sealed for slot in self._slots if slot.sealed >= 0)

    def load(self, step: int, shards: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill the shards in place; returns what was known of the step. The newer steps are forgotten."""
        self.settle()
        slot = next(s for s in self._slots if s.sealed == step)
        slot.read(shards)
        for newer in self._slots:
            if newer.sealed > step:
                newer.unseal()
        self._open, self._committed = None, step
        return slot.meta

    def holds(self, shards: Mapping[str, Tensor]) -> bool:
        """Whether what is held are these tensors, not those of another layout."""
        return all(slot.fits(shards) for slot in self._slots if slot.sealed >= 0)

    def tick(self, step: int) -> bool:
        """Measure the steps; true when it is time for all ranks to agree on `every`, the largest of their wishes."""
        now = time.perf_counter()
        if self._last is not None and step == self._last[0] + 1:
            self._steps.append(now - self._last[1])
        self._last = (step, now)
        return len(self._steps) == AGREE_AFTER or step % AGREE_EVERY == 0

    def wish(self) -> int:
        """Steps between snapshots for which copying stays within COST of the time of a step."""
        if not self._steps:
            return self.every
        step, copying = statistics.median(self._steps), self._copying_s()
        if self.background:  # beside the next step; what is left waits for nobody, but it is not free
            copying = max(copying - BESIDE * step, 0.1 * copying)
        return 1 if copying < FREE_S else max(1, math.ceil(copying / (COST * step)))

    def _copying_s(self) -> float:
        return min(self._copies) if self._copies else self._size / BYTES_PER_S[self.device.type]

    def _fill_up(self, shards: Mapping[str, Tensor]) -> None:
        """Make the files that are missing in the ring, or take those that were made meanwhile."""
        if self._making is None:
            table = Table.of(shards)
            room = psutil.virtual_memory().available * SHARE / self.local_ranks + len(self._slots) * table.size
            keep = min(self.keep, int(room // table.size))
            if self.fewest == 1 and self.keep * table.size > AT_ONCE:
                keep = min(keep, KEEP_ALONE)
            if keep < self.fewest:
                self._slots = []
                self.refused = (
                    f"{self.fewest} copies of this rank need {self.fewest * table.size / 2**30:.2f} GiB of host "
                    f"memory and {room / 2**30:.2f} GiB may be used: faults are recovered from checkpoints on disk"
                )
                return
            if self.keep * table.size > AT_ONCE:
                self.summary = (
                    f"snapshots: {keep} of {table.size / 2**30:.2f} GiB in host memory for each rank, at most "
                    f"{room / 2**30:.2f} GiB ({SHARE:.0%} of what is free)"
                )
            taken = {slot.path for slot in self._slots if slot.path is not None}
            free = [path for i in range(self.keep) if (path := self._path(i)) not in taken]
            self._size, large = table.size, keep * table.size > AT_ONCE
            if large and len(self._steps) < AGREE_AFTER:
                self.every = AGREE_AFTER
            wanted = 1 if large and not self.background else keep - len(self._slots)
            self._making = Making(table, free[:wanted], self.device, self.background)
            self._making.last = len(self._slots) + wanted >= keep
        if self._making.is_alive():
            return
        making, self._making = self._making, None
        if making.error is not None:  # a small /dev/shm, as containers have
            self._slots, why = [], getattr(making.error, "strerror", None) or making.error
            self.refused = f"{why} in {self.folder}: faults are recovered from checkpoints on disk"
        elif all(slot.fits(shards) for slot in making.made):
            self._slots, self._complete = [*self._slots, *making.made], making.last
