"""Requests to stop a run by signal, handled from before torch is imported."""

from __future__ import annotations

import signal
from types import FrameType

from weft.job.errors import Exit


class Signals:
    """Records received signals; the loop checks them after each step, when all ranks can agree."""

    CODES = ((signal.SIGTERM, Exit.PREEMPTED), (signal.SIGUSR1, Exit.PREEMPTED), (signal.SIGINT, Exit.INTERRUPTED))

    def __init__(self) -> None:
        self.received: set[int] = set()
        self.before = {number: signal.signal(number, self._on_signal) for number, _ in self.CODES}
        # the launcher blocks these signals in its children until handlers are installed
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number for number, _ in self.CODES])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.add(number)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """Ignore the signals while the process exits; a second Ctrl-C would look like a failure."""
        for number, _ in self.CODES:
            signal.signal(number, signal.SIG_IGN)

    def flags(self) -> list[float]:
        return [float(number in self.received) for number, _ in self.CODES]

    @classmethod
    def decide(cls, flags: list[float]) -> Exit | None:
        """The exit code that follows from the flags of all ranks, or None."""
        return next((code for flag, (_, code) in zip(flags, cls.CODES, strict=True) if flag), None)
