"""Memory of snapshots: files in shared memory or anonymous memory, with all pages allocated, page-locked for CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.supervisor.memory_folder import allocate as allocate_file

PAGE = 4096
HUGE_PAGE_BYTES = 1 << 30
"""Size from which huge pages are requested."""
POPULATE = 23 if sys.platform == "linux" else -1
"""MADV_POPULATE_WRITE, for which Python has no name."""
UNMAP = 4 if sys.platform == "linux" else -1
"""MADV_DONTNEED, after which the pages of a file still have their content."""
POPULATE_BYTES = 1 << 26
"""Bytes populated in one call, during which no other thread of the process can map memory."""


@cache
def copy_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def allocate(path: Path | None, size: int) -> Tensor:
    """Memory of this size: anonymous, or of a file whose space is reserved now (later, a full disk means SIGBUS)."""
    if path is None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return populated(memory)
    path.unlink(missing_ok=True)
    try:
        allocate_file(path, size)
        with path.open("r+b") as file:
            return mapped_again(populated(mmap.mmap(file.fileno(), size)))
    except OSError:
        path.unlink(missing_ok=True)
        raise


def populated(memory: mmap.mmap) -> Tensor:
    """The memory with all its pages allocated, so that copying into it takes a third of the time.

    mmap.madvise would hold the GIL and block the training thread.
    """
    found = torch.frombuffer(memory, dtype=torch.uint8)
    for at in range(0, len(memory), POPULATE_BYTES):
        if populate(found[at : at + POPULATE_BYTES]):
            found[at::PAGE].zero_()  # an older kernel or another system
            break
    return found


def mapped_again(memory: Tensor) -> Tensor:
    """The memory of a new file, unmapped once: the first time takes three times as long as any later one, and would
    delay the end of a process that is killed, and so its replacement."""
    if memory.numel() >= HUGE_PAGE_BYTES:
        for part in memory.split(POPULATE_BYTES):
            if advise(part, UNMAP) or populate(part):
                break
    return memory


def advise(part: Tensor, advice: int) -> int:
    """madvise() of memory that starts with a page, without the GIL. Not 0: the system cannot."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return int(madvise(part.data_ptr(), part.numel(), advice))


def populate(part: Tensor) -> int:
    """Allocate and map the pages of memory that starts with a page. Not 0: the system cannot."""
    return advise(part, POPULATE)


def map_pages(memory: Tensor) -> None:
    """Map the existing pages of a file by several threads, which page-locking would do one by one."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(populate, memory.split(POPULATE_BYTES)))


def map_file(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def register(memory: Tensor) -> bool:
    """Register the memory with CUDA for asynchronous copies. Returns whether that was possible."""
    if not torch.cuda.is_initialized():
        return False
    with contextlib.suppress(RuntimeError):
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
            return True
        torch.ones(1, device="cuda")  # raises the error that CUDA keeps, which the next launch would raise otherwise
    return False


def unregister(parts: list[Tensor]) -> None:
    """Undo register() before the memory is unmapped, after copies in progress."""
    with contextlib.suppress(RuntimeError):  # the context and its registrations are lost
        if parts:
            copy_stream().synchronize()
        for part in parts:
            torch.cuda.cudart().cudaHostUnregister(part.data_ptr())
