"""Signals that ask a run to save and stop, and their way from the launcher to the ranks."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Protocol, Self

from weft.job.errors import Exit

STOP_CODES = {
    getattr(signal, name): code
    for name, code in (
        ("SIGTERM", Exit.PREEMPTED),
        ("SIGUSR1", Exit.PREEMPTED),
        ("SIGHUP", Exit.PREEMPTED),
        ("SIGQUIT", Exit.PREEMPTED),
        ("SIGINT", Exit.INTERRUPTED),
    )
    if hasattr(signal, name)  # Windows has two of them
}
"""The exit code of a run that was asked to stop by each signal."""

STOP_SIGNALS = tuple(STOP_CODES)

KILL_AFTER_INTERRUPTS = 3
"""Number of Ctrl-C after which the ranks are killed."""


def handled_signals() -> list[signal.Signals]:
    """The stop signals, without SIGHUP where it is ignored (nohup)."""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the stop signals; a child started inside inherits the mask until it installs its handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Signalled(Protocol):
    """A process that can be sent signals."""

    def send_signal(self, number: int, /) -> None: ...


class SignalForwarder:
    """Forwards stop signals to all processes of a run, those that are started later included.

    The ranks are killed at the third Ctrl-C. A context manager; the signals are blocked from its start until `unblock`,
    so that children inherit the mask and none is lost before their handlers are installed.
    """

    def __init__(self) -> None:
        self.processes: list[Signalled] = []
        self.received: list[int] = []

    @property
    def killed(self) -> bool:
        """Whether the ranks were killed by repeated Ctrl-C."""
        return self.received.count(signal.SIGINT) >= KILL_AFTER_INTERRUPTS

    def add(self, process: Signalled) -> None:
        """Forward to this process, also what was received before."""
        self.processes.append(process)
        for number in dict.fromkeys(self.received):
            self._send(process, number)

    def remove(self, process: Signalled) -> None:
        self.processes.remove(process)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        for process in self.processes:
            self._send(process, number)

    def _send(self, process: Signalled, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL if self.killed else number)

    def __enter__(self) -> Self:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._before = {n: signal.signal(n, self._on_signal) for n in handled_signals()}
        return self

    def unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.killed:  # further ones must not suppress the last lines
            self._before[signal.SIGINT] = signal.SIG_IGN
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.unblock()
