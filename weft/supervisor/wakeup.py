"""Bells: the processes of a run wake one another, instead of looking again and again whether something is new.

Ranks that leave no core free are held up by every look of another process, and who waits for them is held up too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


class Bell:
    """A FIFO: whoever has something new rings, whoever waits sleeps in the kernel until then.

    Both sides open it for both, so that nobody waits for the other and nobody's end is heard. What was rung before
    anyone waited is heard at once. One process waits for a bell; it looks at everything then, however often it rang.
    """

    def __init__(self, path: Path):
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        self.handle = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it rings already
            os.write(self.handle, b"\n")

    def wait(self, seconds: float, *others: int) -> bool:
        """Whether it rang before the time was over; also ends when one of the other files can be read."""
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
def rung_by_signals(bell: Bell) -> Iterator[None]:
    """While this lasts, every signal that reaches this process rings: also that a child has ended."""

    def nothing(number: int, frame: FrameType | None) -> None: ...

    before = signal.signal(signal.SIGCHLD, nothing)
    told = signal.set_wakeup_fd(bell.handle, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(told)
        signal.signal(signal.SIGCHLD, before)
