"""Wake-ups between the processes of a run, instead of polling, which takes CPU from the ranks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


class Wakeup:
    """A FIFO on which one process waits and any process notifies.

    Both sides open it for reading and writing, so opening never blocks and no end-of-file is seen. A notification
    before the wait is not lost; several are merged into one.
    """

    def __init__(self, path: Path):
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        self.handle = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def notify(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: already notified
            os.write(self.handle, b"\n")

    def wait(self, seconds: float, *others: int) -> bool:
        """Whether a notification came in time; also returns when one of the other files is readable."""
        waiting = select.poll()
        for handle in (self.handle, *others):
            waiting.register(handle, select.POLLIN)
        found = {handle for handle, _ in waiting.poll(max(0.0, 1e3 * seconds))}
        if self.handle in found:
            with contextlib.suppress(BlockingIOError):
                while os.read(self.handle, 4096):
                    pass
        return self.handle in found

    def close(self) -> None:
        os.close(self.handle)


@contextlib.contextmanager
def wake_on_signals(wakeup: Wakeup) -> Iterator[None]:
    """Inside the block, every signal to this process, SIGCHLD included, wakes the waiter."""

    def nothing(number: int, frame: FrameType | None) -> None: ...

    before = signal.signal(signal.SIGCHLD, nothing)
    fd_before = signal.set_wakeup_fd(wakeup.handle, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd_before)
        signal.signal(signal.SIGCHLD, before)
