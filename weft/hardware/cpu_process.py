"""Memory and threads of a rank's process on a CPU."""

from __future__ import annotations

import contextlib
import ctypes

from weft.hardware.probe import probe


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step, which avoids page faults."""
    trim, pad, map_from = -1, -2, -3  # options of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        for option, size in ((trim, 1 << 30), (pad, 1 << 26), (map_from, 1 << 25)):
            libc.mallopt(option, size)


def threads_for(ranks: int) -> int:
    """Threads of each CPU rank: the cores divided evenly."""
    return max(1, probe().cores_physical // max(1, ranks))
