"""Snapshots of the newest steps of one rank, in shared memory that outlives the process.

A ring of files holds one step each: a header, a table of the tensors with some JSON, and the tensors' bytes. A step is
copied first and sealed when it is committed. The step number in the header is written last, so a file that a killed
process left half-written is not a snapshot.
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

from weft.checkpoint.snapshot_storage import Slot, SlotAllocator, Table, pin_in_background

KEEP = 6
"""Snapshots in the ring. The newest sealed steps of two ranks may differ by one; the older ones are for rolling back
before a bad batch or to the last step that is known to be good."""
MIN_COPIES = 3
"""With fewer snapshots, no step is certain to be complete on every rank."""
MAX_MEMORY_SHARE = 0.25
"""Largest share of the free host memory that the snapshots of all ranks of a machine may take."""
KEEP_ONE_RANK = 2
"""Snapshots of a large state of a single rank: a complete one and one being written; one if two do not fit."""
MAX_COPY_SHARE = 0.0075
"""Largest mean share of a step's time for copying: a larger state is copied every few steps."""
NEGLIGIBLE_COPY_S = 0.002
"""Copying that takes less than this is done at every step."""
AGREE_AFTER, AGREE_EVERY = KEEP + 2, 200
"""Steps after which the ranks agree on the interval between snapshots: once every file of the ring has been written
(the first write takes longer), and then periodically."""
LARGE_RING_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
"""Size up to which the whole ring is allocated before the first copy. Of a larger ring, a CPU rank allocates one file
for each of its first copies; a GPU rank allocates it in the background."""
HIDDEN_SHARE = 0.9
"""Share of a step during which a GPU can copy without delaying the next update."""


def newest_common(held: Iterable[Iterable[int]], at_most: int | None = None) -> int | None:
    """The newest step that every rank holds."""
    sets = [set(steps) for steps in held]
    common = set.intersection(*sets) if sets else set()
    return max((s for s in common if at_most is None or s <= at_most), default=None)


class Snapshots:
    """The snapshots of one rank. Without a folder they are in ordinary memory and end with the process.

    `local_ranks` is the number of ranks that share the machine's memory. `refused` is the reason if nothing is kept.
    """

    def __init__(
        self, folder: Path | None, rank: int, local_ranks: int = 1, keep: int = KEEP,
        device: torch.device = torch.device("cpu"), world: int = 2,
    ):  # fmt: skip
        self.min_copies, self.summary = MIN_COPIES if world > 1 else 1, ""
        self.folder, self.rank, self.local_ranks, self.keep, self.device = folder, rank, local_ranks, keep, device
        self.refused = ""
        self.background = device.type == "cuda"
        """Whether files are allocated, and steps copied, while training continues."""
        self.every = 1
        """Steps between two snapshots, the same on all ranks."""
        self._slots: list[Slot] = []
        self.wanted: Callable[[], tuple[int, int]] = lambda: (-1, 0)
        """The step that other nodes hold replicas of, and the step from which the next is replicated (0: none)."""
        self.trusted = -1
        """The last step that is known to be good: the newest snapshot up to it is kept."""
        self._open: tuple[Slot, int, dict[str, Any]] | None = None
        self._committed = -1
        self._copies: deque[float] = deque(maxlen=8)
        self._measured = True
        """Whether all ranks had measured a copy when they last agreed on `every`."""
        self._steps: deque[float] = deque(maxlen=2 * AGREE_AFTER)
        self._last: tuple[int, float] | None = None
        self._allocator: SlotAllocator | None = None
        self._large = False
        self._continued = False
        """Whether `every` was agreed on by an earlier attempt."""
        self._complete = False
        """Whether all files of the ring are allocated."""
        if folder is not None:
            paths = [self._path(i) for i in range(keep)]
            self._slots = [slot for path in paths if path and (slot := Slot.found(path)) is not None]
            if self._slots and self.background:  # most probably the one that is loaded
                pin_in_background(max(self._slots, key=lambda slot: slot.sealed), device)

    def _path(self, number: int) -> Path | None:
        return None if self.folder is None else self.folder / f"snap-{self.rank}.{number}"

    def due(self, step: int) -> bool:
        return not self.refused and step % self.every == 0

    def take(self, step: int, shards: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
        """Copy this rank's shards, or, for those that only an update changes, let settle() copy them. The snapshot is
        valid once it is sealed."""
        kinds = {slot.table.text: slot for slot in self._slots}  # usually all are alike
        if not all(slot.fits(shards) for slot in kinds.values()):
            self._slots, self._complete = [], False
        if not self._complete:
            self._allocate(shards)
        pinned = self._pinned()
        slot = min((s for s in self._slots if s.sealed not in pinned), key=lambda s: s.sealed, default=None)
        if slot is None or slot.pinned is None:  # refused, or still being allocated
            return
        if self._allocator is not None and self.held() == [slot.sealed]:  # the only one, until there is another
            return
        slot.write(shards)
        self._open = (slot, step, meta)
        if step <= self._committed:
            self.seal(step, {})

    def _pinned(self) -> set[int]:
        """Steps that must not be overwritten: replicas on other nodes need the same step here."""
        safe, target = self.wanted()
        held = self.held()
        sent = [s for s in held if s >= target > 0]
        pinned = {s for s in (safe, *sent[:1]) if s > 0}
        good = [s for s in held if s <= self.trusted][-1:]
        free = len(self._slots) - len(pinned.intersection(held).union(good))
        return pinned.union(good) if free >= MIN_COPIES else pinned

    def seal(self, step: int, more: dict[str, Any]) -> None:
        """Mark the snapshot of a committed step as complete."""
        self._committed = step
        if self._open is not None and self._open[1] == step:
            slot, _, meta = self._open
            slot.seal(step, meta | more | {"every": self.every})
            self._copies.append(slot.copy_s)
            self._open = None

    def settle(self) -> None:
        """Before the state changes: finish the copies of it."""
        if self._open is not None:
            self._open[0].settle()

    def drop(self) -> None:
        """Discard the snapshot of a step that will not be committed."""
        if self._open is not None:
            self._open[0].forget()
            self._open = None

    def held(self) -> list[int]:
        """The steps with a complete snapshot."""
        return sorted(slot.sealed for slot in self._slots if slot.sealed >= 0)

    def load(self, step: int, shards: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill the shards in place and drop newer snapshots. Returns the step's metadata."""
        self.settle()
        slot = next(s for s in self._slots if s.sealed == step)
        slot.read(shards)
        for newer in self._slots:
            if newer.sealed > step:
                newer.unseal()
        self._open, self._committed = None, step
        meta = dict(slot.meta)
        if (every := meta.pop("every", None)) is not None:
            self.every, self._continued = every, True
        return meta

    def holds(self, shards: Mapping[str, Tensor]) -> bool:
        """Whether the snapshots are of these tensors, not those of another layout."""
        return all(slot.fits(shards) for slot in self._slots if slot.sealed >= 0)

    def tick(self, step: int) -> bool:
        """Measure the time of a step. Returns whether all ranks must now agree() on `every`."""
        now, first = time.perf_counter(), self._last is None
        if self._last is not None and step == self._last[0] + 1:
            self._steps.append(now - self._last[1])
        self._last = (step, now)
        if (first and not self._continued) or (not self._measured and step % AGREE_AFTER == 0):
            return True
        return len(self._steps) == AGREE_AFTER or step % AGREE_EVERY == 0

    def agree(self, preferred: Iterable[int]) -> None:
        """Adopt the largest preferred_interval() of the ranks, or, until all have measured one, a short interval."""
        found = list(preferred)
        self._measured = 0 not in found
        if self._measured:
            self.every = max(found)
        elif not self._continued:
            self.every = AGREE_AFTER

    def preferred_interval(self) -> int:
        """Steps between snapshots for which copying takes at most MAX_COPY_SHARE of the time; 0: no copy of a large
        state has been measured."""
        if not self._copies and not self.refused and (self._large or self._continued):
            return 0
        if not self._steps:
            return self.every
        step, copying = statistics.median(self._steps), min(self._copies, default=0.0)
        if self.background:  # a copy that a step hides still takes memory bandwidth
            copying = max(copying - HIDDEN_SHARE * step, 0.1 * copying)
        return 1 if copying < NEGLIGIBLE_COPY_S else max(1, math.ceil(copying / (MAX_COPY_SHARE * step)))

    def _allocate(self, shards: Mapping[str, Tensor]) -> None:
        """Allocate the missing files of the ring, or add those that were allocated in the background."""
        if self._allocator is None:
            table = Table.of(shards)
            held = len(self._slots) * table.size  # by an earlier process
            room = (psutil.virtual_memory().available / self.local_ranks + held) * MAX_MEMORY_SHARE
            keep = max(min(self.keep, int(room // table.size)), len(self._slots))
            limit = LARGE_RING_BYTES[self.device.type]
            if self.min_copies == 1 and self.keep * table.size > limit:
                keep = min(keep, KEEP_ONE_RANK)
            if keep < self.min_copies:
                self._slots = []
                self.refused = (
                    f"{self.min_copies} copies of this rank need {self.min_copies * table.size / 2**30:.2f} GiB of "
                    f"host memory and {room / 2**30:.2f} GiB may be used: faults are recovered from checkpoints on disk"
                )
                return
            self._large = keep * table.size > limit
            if self._large and self.background and self._last is None and not self._continued:
                return  # the first steps of a run compile and load; allocating gigabytes would slow them
            if self.keep * table.size > limit:
                self.summary = (
                    f"snapshots: {keep} of {table.size / 2**30:.2f} GiB in host memory for each rank, at most "
                    f"{room / 2**30:.2f} GiB ({MAX_MEMORY_SHARE:.0%} of what is free)"
                )
            taken = {slot.path for slot in self._slots if slot.path is not None}
            free = [path for i in range(self.keep) if (path := self._path(i)) not in taken]
            count = 1 if self._large and not self.background else keep - len(self._slots)
            last = len(self._slots) + count >= keep
            more = count > 0 or any(slot.pinned is None for slot in self._slots)
            background = self.background and self._large and more
            self._allocator = SlotAllocator(table, self._slots, free[:count], self.device, background, last)
        if self._allocator.is_alive():
            return
        allocator, self._allocator = self._allocator, None
        if allocator.error is not None:  # a small /dev/shm, as in containers
            self._slots, why = [], getattr(allocator.error, "strerror", None) or allocator.error
            self.refused = f"{why} in {self.folder}: faults are recovered from checkpoints on disk"
        elif all(slot.fits(shards) for slot in allocator.slots):
            self._slots, self._complete = [*self._slots, *allocator.slots], allocator.last
