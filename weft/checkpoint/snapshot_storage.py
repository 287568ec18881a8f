"""What a snapshot lies in: a file in shared memory, or as much ordinary memory, and the table of its tensors."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.snapshot_file import HEAD, MAGIC, SEAL, read_table, sealed_step

ALIGN, PAGE = 64, 4096
LARGE = 1 << 30
"""Bytes from which on large pages are worth looking for."""
STEADY = ("model.", "optim.", "ema.")
"""Names of what nothing but an update changes: copied before the next, when ranks wait for one another anyway."""
POPULATE = 23 if sys.platform == "linux" else -1
"""MADV_POPULATE_WRITE, which Python has no name for yet."""
AT_A_TIME = 1 << 26
"""Bytes asked for in one call: meanwhile no other thread of the process can map memory."""


class Table:
    """Which tensor lies where in a file, as text that is the same for every step."""

    def __init__(self, entries: list[tuple[str, str, list[int], int]], head: int, size: int):
        self.entries, self.head, self.size = entries, head, size
        self.text = json.dumps(entries)

    @classmethod
    def of(cls, shards: Mapping[str, Tensor]) -> Table:
        rows = [(n, str(t.dtype).removeprefix("torch."), list(t.shape), 0) for n, t in shards.items()]
        head = -(-(HEAD.size + 2 * len(json.dumps(rows)) + 16 * len(rows) + 4096) // 4096) * 4096
        entries, offset = [], head
        for (name, dtype, shape, _), tensor in zip(rows, shards.values(), strict=True):
            entries.append((name, dtype, shape, offset))
            offset += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        return cls(entries, head, max(offset, head + ALIGN))


class Slot:
    """One file of the ring, or as much ordinary memory."""

    def __init__(
        self, table: Table, memory: Tensor, sealed: int = -1, meta: dict[str, Any] | None = None,
        path: Path | None = None,
    ):  # fmt: skip
        self.table, self.memory, self.sealed, self.meta, self.path = table, memory, sealed, meta or {}, path
        self.bytes = memoryview(memory.numpy().data)
        self.views = {name: _view(memory, dtype, shape, at) for name, dtype, shape, at in table.entries}
        self.pinned = _register(memory)
        """Whether a GPU copies into it by itself, behind the step's own kernels and beside those of the next."""
        if self.pinned:
            # CUDA goes by addresses: memory that is unmapped while registered stays registered, and what is mapped at
            # the same address next, such as a batch, is then copied from the old pages. The slots of an attempt end
            # with it, and the process lives on.
            weakref.finalize(self, _unregister, memory).atexit = False
        self.copied: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.copy_s = 0.0
        self._uncopied: dict[str, Tensor] = {}

    @classmethod
    def found(cls, path: Path) -> Slot | None:
        """What a process before this one left sealed; None where nothing is, or nothing whole."""
        table, step = read_table(path), sealed_step(path)
        if table is None or step is None or not table[0]:
            return None
        entries, meta = table
        try:
            size = path.stat().st_size
            return cls(Table(entries, entries[0][3], size), _map(path, size), step, meta, path)
        except (OSError, TypeError, AttributeError, RuntimeError):
            return None

    def fits(self, shards: Mapping[str, Tensor]) -> bool:
        return self.views.keys() == shards.keys() and all(
            self.views[n].shape == t.shape and self.views[n].dtype == t.dtype for n, t in shards.items()
        )

    def unseal(self) -> None:
        SEAL.pack_into(self.bytes, 8, 0)
        self.sealed = -1

    @torch.no_grad()
    def write(self, shards: Mapping[str, Tensor]) -> None:
        self.unseal()
        if self.pinned:
            return self._write_beside(shards)
        self._uncopied, self.copy_s = {n: t for n, t in shards.items() if n.startswith(STEADY)}, 0.0
        self._copy({n: t for n, t in shards.items() if n not in self._uncopied})

    @torch.no_grad()
    def _copy(self, shards: Mapping[str, Tensor]) -> None:
        if shards:
            began = time.thread_time()  # what it costs: on a busy machine others may run in between
            torch._foreach_copy_([self.views[n] for n in shards], list(shards.values()), non_blocking=self.pinned)
            self.copy_s += time.thread_time() - began

    def _write_beside(self, shards: Mapping[str, Tensor]) -> None:
        """Copy behind the step's own kernels: STEADY in a stream beside those of the next step, until settle(). The
        rest changes before settle() is called (buffers and fp8 maxima in the forward pass, residuals in the
        backward pass) or is gone by then (temporaries), so it is copied in the step's own stream."""
        steady = {n: t for n, t in shards.items() if n.startswith(STEADY)}
        self._copy({n: t for n, t in shards.items() if n not in steady})
        stream = _beside()
        stream.wait_stream(torch.cuda.current_stream())
        self.copied = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            self.copied[0].record()
            self._copy(steady)
            self.copied[1].record()
        for shard in steady.values():
            shard.record_stream(stream)

    def settle(self) -> None:
        """The next update is near: copy what waited for it. Let what a GPU does from here on wait until all is copied:
        it may change what was to be copied."""
        waited, self._uncopied = self._uncopied, {}
        self._copy(waited)
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied[1])

    def forget(self) -> None:
        """Copy no more."""
        self._uncopied = {}

    def seal(self, step: int, meta: dict[str, Any]) -> None:
        self.settle()
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
    def read(self, shards: Mapping[str, Tensor]) -> None:
        torch._foreach_copy_(list(shards.values()), [self.views[n] for n in shards])


@cache
def _beside() -> torch.cuda.Stream:
    return torch.cuda.Stream()


class Making(threading.Thread):
    """Makes slots. Tens of gigabytes take a minute to be given and pinned, so a run on a GPU does not wait for them."""

    def __init__(self, table: Table, paths: list[Path | None], device: torch.device, background: bool):
        super().__init__(name="snapshots", daemon=True)
        self.table, self.paths, self.device = table, paths, device
        self.made: list[Slot] = []
        self.last = False
        """Whether the ring is whole with them."""
        self.error: Exception | None = None
        if background:
            self.start()
        else:
            self.run()

    def run(self) -> None:
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            try:
                for path in self.paths:
                    memory = _memory(path, self.table.size)
                    self.made.append(Slot(self.table, memory, path=path))
                    self.made[-1].unseal()
            except (OSError, RuntimeError, ValueError) as error:
                self.error = error


def _memory(path: Path | None, size: int) -> Tensor:
    """So many bytes: of their own, or of a file all of whose room is taken now, since later there is only SIGBUS."""
    if path is None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without large pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return _touched(memory)
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:  # macOS
            os.truncate(handle, size)
        return _touched(mmap.mmap(handle, size))
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(handle)


def _touched(memory: mmap.mmap) -> Tensor:
    """Memory that is really there: copying into it takes a third of the time.

    Not by mmap's own madvise, which holds Python's lock: the thread that trains would stand still meanwhile.
    """
    found = torch.frombuffer(memory, dtype=torch.uint8)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for at in range(0, len(memory), AT_A_TIME):
        if madvise(found.data_ptr() + at, min(AT_A_TIME, len(memory) - at), POPULATE):
            found[at::PAGE].zero_()  # an older kernel, or another one
            break
    return found


def _map(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _register(memory: Tensor) -> bool:
    """Let a GPU copy into this memory by itself, where there is one in use."""
    if not torch.cuda.is_initialized():
        return False
    with contextlib.suppress(RuntimeError):
        return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0
    return False


def _unregister(memory: Tensor) -> None:
    """Undo _register() before the memory is unmapped, and after the copies that are under way."""
    with contextlib.suppress(RuntimeError):  # the context is lost, and its registrations with it
        _beside().synchronize()
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _view(memory: Tensor, dtype: str, shape: list[int], at: int) -> Tensor:
    kind = getattr(torch, dtype)
    count = 1
    for n in shape:
        count *= n
    return memory[at : at + count * kind.itemsize].view(kind).view(shape)
