"""How long the current thread waited for a CPU core, and how long cores were idle meanwhile.

A thread that waits while all cores are busy is slowed by contention; one that waits while cores are idle is limited by
a quota or an affinity mask. Linux only; elsewhere both are 0.
"""

from __future__ import annotations

import os


class CpuContention:
    """Reads the counters since the last reading."""

    def __init__(self) -> None:
        self._waits, self._idle = _open("/proc/thread-self/schedstat"), _open("/proc/uptime")
        self._before = self._read()

    def since(self) -> tuple[float, float]:
        """Seconds this thread was runnable but not running, and idle seconds of all cores, since the last reading."""
        now, before = self._read(), self._before
        self._before = now
        return max(0.0, now[0] - before[0]), max(0.0, now[1] - before[1])

    def _read(self) -> tuple[float, float]:
        if self._waits is None or self._idle is None:
            return 0.0, 0.0
        try:
            return int(os.pread(self._waits, 96, 0).split()[1]) / 1e9, float(os.pread(self._idle, 96, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return 0.0, 0.0

    def __del__(self) -> None:
        for handle in (self._waits, self._idle):
            if handle is not None:
                os.close(handle)


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
