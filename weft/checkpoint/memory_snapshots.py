"""Snapshots of the newest steps of one rank, in shared memory that outlives the process.

A ring of files holds one step each: a header, a table of the tensors with some JSON, and the tensors' bytes. A step is
copied first and sealed when it is committed. The step number in the header is written last, so a file that a killed
process left half-written is not a snapshot. Of a large state of a single GPU, each file holds a part (state_parts.py).
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

from weft.checkpoint.snapshot_storage import Slot, SlotAllocator, pin_in_background, unpin_in_background
from weft.checkpoint.state_parts import MAX_PARTS, Repeat, StateParts, chain_of, cut_for, holds, load_chain, parts_in
from weft.optim.applied_update import AppliedUpdate

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
PART_COST = 0.01
"""Time that a hidden copy of a part adds to a step, as a share of the copy's own time: PCIe transfers a hundredth of
what the GPU's memory does (55 of 4,800 GB/s on an H200)."""


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
        self._parts: StateParts | None = None
        self._in_parts = True
        """Whether a large state may be copied in parts."""
        self._continued = False
        """Whether `every` was agreed on by an earlier attempt."""
        self._complete = False
        """Whether all files of the ring are allocated."""
        if folder is not None:
            if world > 1:  # parts that a single rank left are of no use
                self._remove_parts()
            paths = [*self._paths("snap", keep), *self._paths("part", MAX_PARTS + 1)]
            self._slots = [slot for path in paths if path and (slot := Slot.found(path)) is not None]
            if self._slots and self.background:  # most probably those that are loaded
                newest = max(self._slots, key=lambda slot: slot.sealed)
                pin_in_background(chain_of(newest, self._slots) or [newest], device)

    def _paths(self, kind: str, count: int) -> list[Path | None]:
        """Names of files: `snap` for whole states, `part` for parts, which are of no use to other ranks."""
        return [None if self.folder is None else self.folder / f"{kind}-{self.rank}.{i}" for i in range(count)]

    def _remove_parts(self) -> None:
        for path in self._paths("part", MAX_PARTS + 1):
            if path is not None:
                path.unlink(missing_ok=True)

    @property
    def parts(self) -> int:
        """The number of parts that the state is copied in."""
        return 1 if self._parts is None else self._parts.count

    def due(self, step: int) -> bool:
        return not self.refused and (step % self.every == 0 or (self.parts > 1 and self._complete))

    def take(
        self, step: int, shards: Mapping[str, Tensor], meta: dict[str, Any], update: AppliedUpdate | None = None
    ) -> None:
        """Copy this rank's shards, or, for those that only an update changes, let settle() copy them. The snapshot is
        valid once it is sealed. With the `update` of the step, a large state may be copied in parts."""
        if self.parts > 1 and update is None:
            return  # this step could not be repeated
        if self._parts is None and self._slots:  # those that an earlier process left
            count = parts_in(self._slots[0])
            self._parts = StateParts(shards, update, count) if count == 1 or update is not None else None
            if self._parts is None:
                self._remove_parts()
        if self._parts is None or not self._parts.fits(shards, update) or not all(map(self._fits, self._slots)):
            self._slots, self._complete, self._parts = [], False, None
        if not self._complete:
            self._allocate(shards, update)
        pinned = self._pinned()
        slot = min((s for s in self._slots if s.sealed not in pinned), key=lambda s: s.sealed, default=None)
        if slot is None or slot.pinned is None:  # refused, or still being allocated
            return
        if self._allocator is not None and (self.parts > 1 or self.held() == [slot.sealed]):
            return  # the only one, until there is another
        assert self._parts is not None
        if update is not None and self.parts > 1:
            meta = meta | {"parts": self.parts, "lr": update.lr}
        slot.use(self._parts.table(step))
        slot.write(self._parts.tensors(step, shards, update))
        self._open = (slot, step, meta)
        if step <= self._committed:
            self.seal(step, {})

    def _fits(self, slot: Slot) -> bool:
        """Whether a snapshot has the tensors that the next one of its step's part would have, or can hold them."""
        assert self._parts is not None
        has_size = slot.memory.numel() == self._parts.size
        return has_size and (slot.sealed < 0 or slot.table.text == self._parts.table(slot.sealed).text)

    def _pinned(self) -> set[int]:
        """Steps that must not be overwritten: replicas on other nodes need the same step here. Parts have no use for a
        single one."""
        if self.parts > 1:
            return set()
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
        """The steps that can be loaded."""
        return sorted(slot.sealed for slot in self._slots if chain_of(slot, self._slots))

    def _chain(self, step: int) -> list[Slot]:
        return chain_of(next(s for s in self._slots if s.sealed == step), self._slots)

    def load(self, step: int, shards: Mapping[str, Tensor], repeat: Repeat | None = None) -> dict[str, Any]:
        """Fill the shards in place and drop newer snapshots. Returns the step's metadata. Of a state in parts, updates
        are repeated by `repeat`."""
        self.settle()
        chain = self._chain(step)
        load_chain(chain, shards, repeat)
        self.forget_after(step)
        self._open, self._committed = None, step
        meta = {key: value for key, value in chain[-1].meta.items() if key not in ("parts", "lr")}
        if (every := meta.pop("every", None)) is not None:
            self.every, self._continued = every, True
        return meta

    def forget_after(self, step: int) -> None:
        """Drop the snapshots of later steps, which will be computed again."""
        for newer in self._slots:
            if newer.sealed > step:
                newer.unseal()

    def holds(self, shards: Mapping[str, Tensor]) -> bool:
        """Whether the snapshots are of these tensors, not those of another layout."""
        return all(holds(self._chain(step), shards) for step in self.held())

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
        if self._measured and self.parts > 1 and max(found) > 1:
            self._copy_whole()
        elif self._measured:
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
        if self.parts > 1:
            copying = max(copying - HIDDEN_SHARE * step, PART_COST * copying)
        elif self.background:  # a copy that a step hides still takes memory bandwidth
            copying = max(copying - HIDDEN_SHARE * step, 0.1 * copying)
        return 1 if copying < NEGLIGIBLE_COPY_S else max(1, math.ceil(copying / (MAX_COPY_SHARE * step)))

    def _copy_whole(self) -> None:
        """Copy the whole state every few steps instead of parts in every step, which take too long or do not fit."""
        self._remove_parts()
        self.settle()
        self.drop()
        if self.background:
            unpin_in_background(self._slots, self.device)
        self._slots, self._complete, self._parts, self._in_parts = [], False, None, False
        self._copies.clear()
        self.every, self._measured = AGREE_AFTER, False

    def _allocate(self, shards: Mapping[str, Tensor], update: AppliedUpdate | None) -> None:
        """Allocate the missing files of the ring, or add those that were allocated in the background."""
        if self._allocator is None:
            held = sum(slot.memory.numel() for slot in self._slots)  # by an earlier process
            room = (psutil.virtual_memory().available / self.local_ranks + held) * MAX_MEMORY_SHARE
            limit = LARGE_RING_BYTES[self.device.type]
            parts = self._parts or StateParts(shards)
            large = self.keep * parts.size > limit
            if self._parts is None and self.min_copies == 1 and large and update is not None and self._in_parts:
                parts = cut_for(shards, update, room) or parts
            keep = max(min(self.keep, int(room // parts.size)), len(self._slots))
            if parts.count > 1:
                keep = parts.count + 1
            elif self.min_copies == 1 and large:
                keep = min(keep, KEEP_ONE_RANK)
            if keep < self.min_copies:
                self._slots = []
                self.refused = (
                    f"{self.min_copies} copies of this rank need {self.min_copies * parts.size / 2**30:.2f} GiB of "
                    f"host memory and {room / 2**30:.2f} GiB may be used: faults are recovered from checkpoints on disk"
                )
                return
            self._large = keep * parts.size > limit
            if self._large and self.background and self._last is None and not self._continued:
                return  # the first steps of a run compile and load; allocating gigabytes would slow them
            self._parts = parts
            if large or parts.count > 1:
                of = f", each with 1/{parts.count} of the state and other gradients," if parts.count > 1 else ""
                self.summary = (
                    f"snapshots: {keep} of {parts.size / 2**30:.2f} GiB{of} in host memory for each rank, at most "
                    f"{room / 2**30:.2f} GiB ({MAX_MEMORY_SHARE:.0%} of what is free)"
                )
            taken = {slot.path for slot in self._slots if slot.path is not None}
            kind = "snap" if parts.count == 1 else "part"
            free = [path for path in self._paths(kind, max(keep, self.keep)) if path not in taken]
            count = 1 if self._large and not self.background else keep - len(self._slots)
            last = len(self._slots) + count >= keep
            more = count > 0 or any(slot.pinned is None for slot in self._slots)
            background = self.background and self._large and more
            self._allocator = SlotAllocator(
                parts.tables[0], parts.size, self._slots, free[:count], self.device, background, last
            )
        if self._allocator.is_alive():
            return
        allocator, self._allocator = self._allocator, None
        if allocator.error is not None and self.parts > 1:
            self._slots += allocator.slots
            self._copy_whole()  # which may fit
        elif allocator.error is not None:  # a small /dev/shm, as in containers
            self._slots, why = [], getattr(allocator.error, "strerror", None) or allocator.error
            self.refused = f"{why} in {self.folder}: faults are recovered from checkpoints on disk"
        elif self._parts is not None and allocator.size == self._parts.size:
            self._slots, self._complete = [*self._slots, *allocator.slots], allocator.last
