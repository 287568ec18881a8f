"""Wishes to stop, as they arrive: Ctrl-C, or the notice of a scheduler. Listened for before torch is imported."""

from __future__ import annotations

import signal
from types import FrameType

from weft.job.errors import Exit


class Signals:
    """Notes which signals came; the loop asks at the end of each step, when all ranks can agree."""

    CODES = ((signal.SIGTERM, Exit.PREEMPTED), (signal.SIGUSR1, Exit.PREEMPTED), (signal.SIGINT, Exit.INTERRUPTED))

    def __init__(self) -> None:
        self.received: set[int] = set()
        self.before = {number: signal.signal(number, self._on_signal) for number, _ in self.CODES}
        # the launcher starts its ranks with these held back, until someone listens
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number for number, _ in self.CODES])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.add(number)

    def restore(self) -> None:
        """The run is over: signals mean again what they meant before."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """The process is over: Python would let a second Ctrl-C end it while it closes, which looks like a failure."""
        for number, _ in self.CODES:
            signal.signal(number, signal.SIG_IGN)

    def flags(self) -> list[float]:
        return [float(number in self.received) for number, _ in self.CODES]

    @classmethod
    def decide(cls, flags: list[float]) -> Exit | None:
        """One answer from the flags of all ranks."""
        return next((code for flag, (_, code) in zip(flags, cls.CODES, strict=True) if flag), None)
