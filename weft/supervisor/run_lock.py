"""The lock of a run folder: one launcher at a time may use it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from weft.job.errors import JobError
from weft.job.run_folder import RunDir


@contextlib.contextmanager
def run_lock(run: RunDir, wait_s: float = 15.0) -> Iterator[int]:
    """Hold the lock of a run folder; yields its file descriptor, which ranks inherit, so that it outlives the
    launcher."""
    run.path.mkdir(parents=True, exist_ok=True)
    handle = os.open(run.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                raise JobError(f"{run.path} is being trained by another process; wait for it, or give name=") from None
            time.sleep(0.05)
    try:
        yield handle
    finally:
        os.close(handle)
