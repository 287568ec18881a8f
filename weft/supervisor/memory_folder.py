"""The folder in shared memory that the processes of a run use: status board, rendezvous files and snapshots."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.job.errors import MachineError, describe_file_error

PREFIX, IN_USE, RESERVE = "weft-", "in-use", "reserve"
RESERVE_BYTES = 1 << 15
"""Allocated at the start and freed when small files no longer fit, so that a full /dev/shm does not end the run."""


def candidates() -> list[Path]:
    """Where the folder may be: in memory if possible, else in the temporary folder."""
    shared = ["/dev/shm"] if os.access("/dev/shm", os.W_OK | os.X_OK) else []
    return [Path(p) for p in (*shared, tempfile.gettempdir())]


@contextlib.contextmanager
def memory_folder(log: Callable[[str], None], bases: list[Path] | None = None) -> Iterator[Path]:
    """A new folder, removed at the end. Folders of killed runs are removed first."""
    bases = bases or candidates()
    for base in bases:
        remove_leftovers(base)
    folder, handle = _create(bases, log)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _create(bases: list[Path], log: Callable[[str], None]) -> tuple[Path, int]:
    for i, base in enumerate(bases):
        folder, handle = None, -1
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            allocate(folder / RESERVE, RESERVE_BYTES)
            handle = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
            return folder, handle
        except OSError as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if handle >= 0:
                os.close(handle)
            if i + 1 == len(bases):
                why = describe_file_error(OSError(error.errno, error.strerror, str(base)))
                raise MachineError(f"{why}; TMPDIR can name another folder") from error
            log(f"{base}: {error.strerror}; status board and snapshots are kept in {bases[i + 1]} instead")
    raise AssertionError("no candidate")


def remove_leftovers(base: Path) -> None:
    """Remove folders of runs whose launcher was killed: those of this user that no process locks."""
    with contextlib.suppress(OSError):
        for folder in base.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                status = folder.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                    continue
                handle = os.open(folder / IN_USE, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                finally:
                    os.close(handle)


def allocate(path: Path, size: int) -> None:
    """Create a file with all its space, which a later write through a map would otherwise miss (SIGBUS)."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:  # macOS
            os.truncate(handle, size)
    finally:
        os.close(handle)


def write_file(path: Path, text: str) -> None:
    """Write a small file of the memory folder atomically; uses the reserve if the file system is full."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    for reserve in (path.with_name(RESERVE), None):
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(path)
            return
        except OSError as error:
            if error.errno != errno.ENOSPC or reserve is None or not reserve.exists():
                raise
            reserve.unlink(missing_ok=True)
