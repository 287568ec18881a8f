"""The lock of a run folder: one launcher at a time may use it, or all nodes of one run together."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.job.errors import JobError, MachineError
from weft.job.files.run_folder import RunDir


@dataclass(frozen=True)
class RunLock:
    """A held lock. Ranks inherit its file descriptor, so that it outlives a killed launcher."""

    path: Path
    handle: int
    created: bool
    """Whether this call created the run folder."""
    inherit: tuple[int, ...] = ()
    """Other open files that the ranks inherit, such as the claim of the queue."""

    @property
    def handles(self) -> tuple[int, ...]:
        """The open files that the processes of the run inherit."""
        return (self.handle, *self.inherit)

    def check(self) -> None:
        """Raise if the run folder was moved, deleted or replaced since."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self.handle)):
                return
        raise MachineError(
            f"the run folder {self.path.parent} was moved or deleted while the run used it: the run was stopped, and "
            "steps after its last checkpoint are lost; move the folder back and start the same command again to resume"
        )


@contextlib.contextmanager
def run_lock(
    run: RunDir, wait_s: float = 15.0, *, shared: bool = False, inherit: tuple[int, ...] = ()
) -> Iterator[RunLock]:
    """Hold the lock of a run folder, which is created if missing. `shared`: together with other nodes of the run."""
    run.path.parent.mkdir(parents=True, exist_ok=True)
    try:
        run.path.mkdir()
        created = True
    except FileExistsError:
        created = False
    path = run.path / ".lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        raise JobError(f"{path} must be a regular file; remove it, or give another name=") from None
    try:
        with contextlib.suppress(PermissionError):
            os.fchmod(handle, 0o600)
        _wait_for(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, run, wait_s)
        lock = RunLock(path, handle, created, inherit)
        lock.check()
        yield lock
    finally:
        os.close(handle)


def _wait_for(handle: int, kind: int, run: RunDir, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise JobError(f"{run.path} is being trained by another process; wait for it, or give name=") from None
            time.sleep(0.05)
