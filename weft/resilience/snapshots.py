"""The newest steps of one rank, kept in shared memory: files that outlive the process that wrote them.

Each of a ring of files holds one step: a head, a table of the tensors with a little JSON, then the tensors' bytes. A
step is first copied, and sealed when it is committed: the number of the step in the head is written last, so what a
killed process left half-written is no snapshot at all.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from weft.resilience.snapfile import HEAD, MAGIC, SEAL

KEEP = 6
"""Steps in the ring. While one is written, the ranks may differ by one in the newest that they have sealed; the rest
is for going back before a bad batch, and to the last step that is known to be good."""

FEWEST = 3
"""With less than this no step is sure to be whole on every rank."""

SHARE = 0.5
"""Of the memory that is free, what the snapshots of all ranks of a machine may take."""

COST = 0.0075
"""Of the time of a step, what copying may take on average: a larger state is copied every few steps."""

FREE_S = 0.002
"""Copying that takes less than this is done at every step, however short."""

AGREE_AFTER, AGREE_EVERY = KEEP + 2, 200
"""Steps after which ranks agree how often to copy: soon after a start, when all of the ring has been written once (the
first time takes longer), and then now and then."""

ALIGN, PAGE = 64, 4096


def newest_common(held: Iterable[Iterable[int]], at_most: int | None = None) -> int | None:
    """The newest step that every rank has whole."""
    sets = [set(steps) for steps in held]
    common = set.intersection(*sets) if sets else set()
    return max((s for s in common if at_most is None or s <= at_most), default=None)


class Snapshots:
    """The ring of one rank. Without a folder it is ordinary memory, which serves for going back but not for outliving.

    `local_ranks` share the machine's memory. `refused` says why nothing is kept, where that is so.
    """

    def __init__(self, folder: Path | None, rank: int, local_ranks: int = 1, keep: int = KEEP):
        self.folder, self.rank, self.local_ranks, self.keep = folder, rank, local_ranks, keep
        self.refused = ""
        self.every = 1
        """Steps between two of them, the same on all ranks."""
        self._slots: list[_Slot] = []
        self.wanted: Callable[[], tuple[int, int]] = lambda: (-1, 0)
        """The step that other machines hold copies of, and the one from which on the next is copied (0: none)."""
        self.trusted = -1
        """The last step that is known to be good: the newest up to it stays."""
        self._open: tuple[_Slot, int, dict[str, Any]] | None = None
        self._committed = -1
        self._copies: deque[float] = deque(maxlen=8)
        self._steps: deque[float] = deque(maxlen=2 * AGREE_AFTER)
        self._last: tuple[int, float] | None = None
        self._complete = False
        """Whether the ring was filled up: of what a process before this one left, only whole steps are taken over."""
        if folder is not None:
            paths = [self._path(i) for i in range(keep)]
            self._slots = [slot for path in paths if path and (slot := _Slot.found(path)) is not None]

    def _path(self, number: int) -> Path | None:
        return None if self.folder is None else self.folder / f"snap-{self.rank}.{number}"

    def due(self, step: int) -> bool:
        return not self.refused and step % self.every == 0

    def take(self, step: int, pieces: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
        """Copy this rank's pieces as they are now. It counts once it is sealed."""
        if not all(slot.fits(pieces) for slot in self._slots):
            self._slots, self._complete = [], False
        if not self._complete:
            self._fill_up(pieces)
            if self.refused:
                return
        slot = min((s for s in self._slots if s.sealed not in self._pinned()), key=lambda s: s.sealed)
        slot.write(pieces)
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

    def held(self) -> list[int]:
        """The steps that are whole here."""
        return sorted(slot.sealed for slot in self._slots if slot.sealed >= 0)

    def load(self, step: int, pieces: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill the pieces in place; returns what was known of the step. The newer steps are forgotten."""
        slot = next(s for s in self._slots if s.sealed == step)
        slot.read(pieces)
        for newer in self._slots:
            if newer.sealed > step:
                newer.unseal()
        self._open, self._committed = None, step
        return slot.meta

    def holds(self, pieces: Mapping[str, Tensor]) -> bool:
        """Whether what is held are these tensors, not those of another layout."""
        return all(slot.fits(pieces) for slot in self._slots if slot.sealed >= 0)

    def tick(self, step: int) -> bool:
        """Measure the steps; true when it is time for all ranks to agree on `every`, the largest of their wishes."""
        now = time.perf_counter()
        if self._last is not None and step == self._last[0] + 1:
            self._steps.append(now - self._last[1])
        self._last = (step, now)
        return len(self._steps) == AGREE_AFTER or step % AGREE_EVERY == 0

    def wish(self) -> int:
        """Steps between snapshots for which copying stays within COST of the time of a step."""
        if not self._copies or not self._steps or min(self._copies) < FREE_S:
            return 1
        return max(1, math.ceil(min(self._copies) / (COST * statistics.median(self._steps))))

    def _fill_up(self, pieces: Mapping[str, Tensor]) -> None:
        """Make the files that are missing in the ring."""
        table, self._complete = _Table.of(pieces), True
        room = psutil.virtual_memory().available * SHARE / self.local_ranks + len(self._slots) * table.size
        keep = min(self.keep, int(room // table.size))
        if keep < FEWEST:
            self._slots = []
            self.refused = (
                f"{FEWEST} copies of this rank's state need {FEWEST * table.size / 2**30:.2f} GiB of host memory and "
                f"{room / 2**30:.2f} GiB may be used: faults are recovered from checkpoints on disk"
            )
            return
        taken = {slot.path for slot in self._slots if slot.path is not None}
        free = [path for i in range(self.keep) if (path := self._path(i)) not in taken]
        try:
            for path in free[: keep - len(self._slots)]:
                memory = _memory(path, table.size)
                memory[::PAGE].zero_()  # once touched, copying takes a third of the time
                self._slots.append(_Slot(table, memory, path=path))
                self._slots[-1].unseal()
        except OSError as error:  # a small /dev/shm, as containers have
            self._slots = []
            self.refused = f"{error.strerror or error} in {self.folder}: faults are recovered from checkpoints on disk"


class _Table:
    """Which tensor lies where in a file, as text that is the same for every step."""

    def __init__(self, entries: list[tuple[str, str, list[int], int]], head: int, size: int):
        self.entries, self.head, self.size = entries, head, size
        self.text = json.dumps(entries)

    @classmethod
    def of(cls, pieces: Mapping[str, Tensor]) -> _Table:
        rows = [(n, str(t.dtype).removeprefix("torch."), list(t.shape), 0) for n, t in pieces.items()]
        head = -(-(HEAD.size + 2 * len(json.dumps(rows)) + 16 * len(rows) + 4096) // 4096) * 4096
        entries, offset = [], head
        for (name, dtype, shape, _), tensor in zip(rows, pieces.values(), strict=True):
            entries.append((name, dtype, shape, offset))
            offset += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        return cls(entries, head, max(offset, head + ALIGN))


class _Slot:
    """One file of the ring, or as much ordinary memory."""

    def __init__(
        self, table: _Table, memory: Tensor, sealed: int = -1, meta: dict[str, Any] | None = None,
        path: Path | None = None,
    ):  # fmt: skip
        self.table, self.memory, self.sealed, self.meta, self.path = table, memory, sealed, meta or {}, path
        self.bytes = memoryview(memory.numpy().data)
        self.views = {name: _view(memory, dtype, shape, at) for name, dtype, shape, at in table.entries}
        self.pinned = _pin(memory)
        self.copied: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.copy_s = 0.0

    @classmethod
    def found(cls, path: Path) -> _Slot | None:
        """What a process before this one left sealed; None where nothing is, or nothing whole."""
        try:
            with path.open("rb") as file:
                magic, sealed, head, length, crc = HEAD.unpack(file.read(HEAD.size))
                text = file.read(min(length, head))
            if magic != MAGIC or not sealed or zlib.crc32(text) != crc:
                return None
            content, size = json.loads(text), path.stat().st_size
            table = _Table([(n, d, s, at) for n, d, s, at in content["tensors"]], head, size)
            return cls(table, _map(path, size), sealed - 1, content["meta"], path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RuntimeError):
            return None

    def fits(self, pieces: Mapping[str, Tensor]) -> bool:
        return self.views.keys() == pieces.keys() and all(
            self.views[n].shape == t.shape and self.views[n].dtype == t.dtype for n, t in pieces.items()
        )

    def unseal(self) -> None:
        SEAL.pack_into(self.bytes, 8, 0)
        self.sealed = -1

    @torch.no_grad()
    def write(self, pieces: Mapping[str, Tensor]) -> None:
        began = time.thread_time()  # what it costs: on a busy machine others may run in between
        self.unseal()
        self.copied = (
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if self.pinned else None
        )
        if self.copied is not None:
            self.copied[0].record()
        torch._foreach_copy_(list(self.views.values()), list(pieces.values()), non_blocking=self.pinned)
        if self.copied is not None:  # a GPU copies behind the step's own kernels, and before those of the next
            self.copied[1].record()
        self.copy_s = time.thread_time() - began

    def seal(self, step: int, meta: dict[str, Any]) -> None:
        if self.copied is not None:
            self.copied[1].synchronize()
            self.copy_s = self.copied[0].elapsed_time(self.copied[1]) / 1e3
        text = f'{{"meta": {json.dumps(meta)}, "tensors": {self.table.text}}}'.encode()
        if HEAD.size + len(text) > self.table.head:
            raise ValueError(f"{len(text)} bytes beside the tensors of a snapshot; room was kept for {self.table.head}")
        self.bytes[HEAD.size : HEAD.size + len(text)] = text
        HEAD.pack_into(self.bytes, 0, MAGIC, 0, self.table.head, len(text), zlib.crc32(text))
        SEAL.pack_into(self.bytes, 8, step + 1)
        self.meta, self.sealed = json.loads(json.dumps(meta)), step

    @torch.no_grad()
    def read(self, pieces: Mapping[str, Tensor]) -> None:
        torch._foreach_copy_(list(pieces.values()), [self.views[n] for n in pieces])


def _memory(path: Path | None, size: int) -> Tensor:
    """So many bytes: of their own, or of a file all of whose room is taken now, since later there is only SIGBUS."""
    if path is None:
        return torch.empty(size, dtype=torch.uint8)
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:  # macOS
            os.truncate(handle, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(handle)
    return _map(path, size)


def _map(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _pin(memory: Tensor) -> bool:
    """Let a GPU copy into this memory by itself, where there is one in use."""
    if not torch.cuda.is_initialized():
        return False
    with contextlib.suppress(RuntimeError):
        return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0
    return False


def _view(memory: Tensor, dtype: str, shape: list[int], at: int) -> Tensor:
    kind = getattr(torch, dtype)
    count = 1
    for n in shape:
        count *= n
    return memory[at : at + count * kind.itemsize].view(kind).view(shape)
