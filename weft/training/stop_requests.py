"""Requests to stop a run by signal, handled from before torch is imported."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from weft.job.errors import Exit
from weft.supervisor.stop_signals import STOP_CODES, STOP_SIGNALS, handled_signals


class Signals:
    """Records received signals; the loop checks them after each step, when all ranks can agree."""

    def __init__(self) -> None:
        self.received: set[int] = set()
        self.asked: Callable[[], bool] = lambda: False
        """Whether the supervisor asks this rank to save and stop, as SIGUSR1 does."""
        self.begun = threading.Event()
        self.before = {number: signal.signal(number, self._on_signal) for number in handled_signals()}
        # the launcher blocks these signals in its children until handlers are installed
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.add(number)

    def exit_until_begun(self) -> None:
        """Until `begin`, exit on a signal even while the main thread waits in C code, such as for data or another rank:
        nothing has to be saved. Not needed under a process manager, which ends such ranks."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        self.begun.clear()
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._exit_on_signal, args=(read,), daemon=True).start()
        for number in self.received:
            os.write(write, bytes([number]))

    def _exit_on_signal(self, numbers: int) -> None:
        while not self.begun.is_set():
            for number in os.read(numbers, 64):
                if number in STOP_CODES and not self.begun.is_set():
                    os._exit(int(STOP_CODES[signal.Signals(number)]))

    def begin(self) -> None:
        """From now on the ranks agree to stop."""
        self.begun.set()

    def restore(self) -> None:
        """Restore the previous handlers."""
        signal.set_wakeup_fd(-1)
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """Ignore the signals while the process exits; a second Ctrl-C would look like a failure."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def flags(self) -> list[float]:
        found = self.received | ({signal.SIGUSR1} if self.asked() else set())
        return [float(number in found) for number in STOP_SIGNALS]

    @staticmethod
    def decide(flags: list[float]) -> Exit | None:
        """The exit code that follows from the flags of all ranks, or None."""
        return next((code for flag, code in zip(flags, STOP_CODES.values(), strict=True) if flag), None)
