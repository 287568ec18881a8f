"""States on disk: preallocated files, read ahead and written behind by one thread, around the page cache.

A piece of the model has a place in the rank's file. One thread serves all requests in order: a disk is not faster with
more, and a read after a write of the same place needs no further care.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from weft.job.errors import FitError, MachineError
from weft.memory.host_copies import Copies, Event
from weft.memory.host_memory import allocate_host

SECTOR = 4096
"""Alignment of offsets, sizes and memory for O_DIRECT."""
STAGING_BUFFERS = 4
"""Host buffers for pieces between disk and device."""
TRANSFER_BYTES = 16 << 20
"""Bytes of one read or write."""


def _up(size: int) -> int:
    return -(-size // SECTOR) * SECTOR


class DiskFile:
    """A preallocated file that is read and written in whole sectors, with O_DIRECT where the file system has it."""

    def __init__(self, path: Path, size: int):
        self.path, self.size = path, size
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.direct = hasattr(os, "O_DIRECT") and not is_tmpfs(path.parent)
            flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.direct else 0)
            try:
                self.file = os.open(path, flags, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct, self.file = False, os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.posix_fallocate(self.file, 0, size)
        except OSError as error:
            raise FitError(
                f"memory.disk={path.parent} cannot hold {size / 2**30:.2f} GiB of states ({error.strerror}); free the "
                "space, or name another folder"
            ) from None

    def read(self, offset: int, memory: Tensor) -> None:
        """Fill memory (uint8, aligned, whole sectors)."""
        self._transfer(os.preadv, offset, memory, "read")

    def write(self, offset: int, memory: Tensor) -> None:
        self._transfer(os.pwritev, offset, memory, "written")

    def _transfer(self, call: Callable[..., int], offset: int, memory: Tensor, what: str) -> None:
        view = memoryview(memory.numpy().data)
        done = 0
        while done < len(view):
            part = view[done : done + TRANSFER_BYTES]
            try:
                count = call(self.file, [part], offset + done)
            except OSError as error:
                raise MachineError(f"{self.path} cannot be {what} at {offset + done}: {error.strerror}") from None
            if count <= 0:
                raise MachineError(
                    f"{self.path} ends at {offset + done} of {self.size} bytes: it was truncated while the run used it"
                )
            done += count if count % SECTOR == 0 or not self.direct else count // SECTOR * SECTOR
            if count < SECTOR and self.direct:
                raise MachineError(f"{self.path}: only {count} of {len(part)} bytes at {offset + done} were {what}")

    def close(self) -> None:
        os.close(self.file)


class DiskStates:
    """The states of one rank on disk, by piece. Without a file it holds nothing."""

    def __init__(self, file: DiskFile | None, sizes: list[list[int]], stage_bytes: int, device: torch.device):
        self.file, self.sizes = file, sizes
        self.places = [list(accumulate(map(_up, row), initial=0)) for row in sizes]
        """Of each piece, where its states begin, and where the last one ends."""
        self.offsets = list(accumulate((place[-1] for place in self.places), initial=0))
        self.device = device
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="weft-disk") if file is not None else None
        self.stages = _aligned(STAGING_BUFFERS if file is not None else 0, stage_bytes, device, self)
        self.error: BaseException | None = None
        """The error of a write in the background."""

    @classmethod
    def make(cls, folder: Path, rank: int, sizes: list[list[int]], device: torch.device) -> DiskStates:
        """The states of these sizes, by piece, in a file of the folder, which is empty after the run."""
        sector_sizes = [sum(map(_up, row)) for row in sizes]
        total = sum(sector_sizes)
        if not total:
            return cls(None, sizes, 0, device)
        path = folder / f"states-{rank}-{os.getpid()}.bin"
        file = DiskFile(path, total)
        path.unlink()  # the space is given back when the process ends, however it ends
        return cls(file, sizes, max(sector_sizes), device)

    def fetch(self, piece: int, targets: Sequence[Tensor], copies: Copies, after: Iterable[Event]) -> Event:
        """Read a piece and copy it to the device. The result is for arrived()."""
        assert self.thread is not None
        return _Later(self.thread.submit(self._fetch, piece, targets, copies, list(after)))

    def _fetch(self, piece: int, targets: Sequence[Tensor], copies: Copies, after: list[Event]) -> Event:
        stage = self._next_stage(copies)
        whole = stage.memory[: self.places[piece][-1]]
        assert self.file is not None
        self.file.read(self.offsets[piece], whole)
        stage.busy = copies.fetch(self._pairs(piece, whole, targets, inward=True), after)
        return stage.busy

    def store(self, piece: int, sources: Sequence[Tensor], copies: Copies, updated: Event) -> Event:
        """Copy a piece from the device and write it. The event is the end of the copy."""
        assert self.thread is not None
        copied: Future[Event] = Future()
        self.thread.submit(self._store, piece, sources, copies, updated, copied)
        return _Later(copied)

    def _store(
        self, piece: int, sources: Sequence[Tensor], copies: Copies, updated: Event, copied: Future[Event]
    ) -> None:
        try:
            stage = self._next_stage(copies)
            whole = stage.memory[: self.places[piece][-1]]
            event = copies.store(self._pairs(piece, whole, sources, inward=False), [updated])
            copied.set_result(event)
            copies.finish(event)
            assert self.file is not None
            self.file.write(self.offsets[piece], whole)
        except BaseException as error:
            self.error = self.error or error
            if not copied.done():
                copied.set_exception(error)

    def arrived(self, event: Event) -> Event:
        """The event of a fetch, once it is under way; raises the error of the disk's thread."""
        if self.error is not None:
            raise self.error
        return event.future.result() if isinstance(event, _Later) else event

    def finish(self) -> None:
        """Wait until everything is written."""
        if self.thread is not None:
            self.thread.submit(lambda: None).result()
        if self.error is not None:
            raise self.error

    def read(self, piece: int, index: int) -> Tensor:
        """One state of a piece, as bytes in host memory."""
        begin, end = self.places[piece][index : index + 2]
        memory = _aligned(1, end - begin, torch.device("cpu"), self)[0].memory
        assert self.file is not None
        self.file.read(self.offsets[piece] + begin, memory)
        return memory[: self.sizes[piece][index]]

    def write(self, piece: int, index: int, value: Tensor) -> None:
        """Set one state of a piece."""
        begin, end = self.places[piece][index : index + 2]
        memory = _aligned(1, end - begin, torch.device("cpu"), self)[0].memory
        memory[: self.sizes[piece][index]].copy_(value.reshape(-1).view(torch.uint8))
        assert self.file is not None
        self.file.write(self.offsets[piece] + begin, memory)

    def _pairs(self, piece: int, whole: Tensor, tensors: Sequence[Tensor], inward: bool) -> list[tuple[Tensor, Tensor]]:
        out = []
        for begin, tensor in zip(self.places[piece], tensors, strict=False):
            size = tensor.numel() * tensor.element_size()
            there = whole[begin : begin + size].view(tensor.dtype).view(tensor.shape)
            out.append((tensor, there) if inward else (there, tensor))
        return out

    def _next_stage(self, copies: Copies) -> _Stage:
        stage = self.stages.pop(0)
        self.stages.append(stage)
        if stage.busy is not None:
            copies.finish(stage.busy)
            stage.busy = None
        return stage


class _Later:
    """An event that a thread still has to make."""

    def __init__(self, future: Future[Event]):
        self.future = future


class _Stage:
    def __init__(self, memory: Tensor):
        self.memory = memory
        self.busy: Event | None = None


def _aligned(count: int, size: int, device: torch.device, owner: object) -> list[_Stage]:
    """Host buffers that start at a sector."""
    made = allocate_host([((size + SECTOR,), torch.uint8)] * count, device, owner)
    starts = [-memory.data_ptr() % SECTOR for memory in made]
    return [_Stage(memory[start : start + size]) for memory, start in zip(made, starts, strict=True)]


def is_tmpfs(folder: Path) -> bool:
    """Whether a folder is in memory."""
    best, kind = "", ""
    try:
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, found, *_ = line.split()
            inside = str(folder.resolve()) == mount or str(folder.resolve()).startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, found
    except OSError:
        return False
    return kind in ("tmpfs", "ramfs")
