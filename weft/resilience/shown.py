"""The environment of a process as others see it: a fork that was given its rank later shows it like any other rank.

Linux shows the environment that a process was started with. People and their tools look there for RANK, so what has
changed since is laid out anew and the kernel told where.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from pathlib import Path

PR_SET_MM, PR_SET_MM_MAP = 35, 14
FIELDS = (26, 27, 45, 46, 47, 0, 28, 48, 49)
"""Of /proc/self/stat, from 1, in the order of struct prctl_mm_map; 0 is the end of the heap, which it does not tell."""


class _Map(ctypes.Structure):
    _fields_ = (
        ("addresses", ctypes.c_uint64 * 11), ("auxv", ctypes.c_uint64), ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )  # fmt: skip


def show(environment: Mapping[str, str]) -> object:
    """Let others see this environment for as long as what is returned is kept; where that cannot be, they see the old
    one."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    stat = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    block = b"".join(
        f"{name}={value}".encode("utf-8", "surrogateescape") + b"\0" for name, value in environment.items()
    )
    memory = ctypes.create_string_buffer(block, len(block))
    first = ctypes.addressof(memory)
    known = [int(stat[field - 3]) if field else libc.sbrk(0) for field in FIELDS]
    wanted = _Map((ctypes.c_uint64 * 11)(*known, first, first + len(block)), 0, 0, 0xFFFFFFFF)
    libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(wanted), ctypes.sizeof(wanted), 0)
    return memory
