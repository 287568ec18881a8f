"""Files that a dataset holds open, in processes that are forked from the one that opened them.

A fork shares the positions of open files with its parent, so that a seek of one would move the reads of the other.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")


def read_positions() -> dict[int, int]:
    """The positions of the files that this process has opened for reading, by descriptor; none without /proc."""
    found = {}
    with suppress(OSError):
        for number in map(int, os.listdir(DESCRIPTORS)):
            with suppress(OSError):  # the listing's own descriptor is closed by now
                if stat.S_ISREG(os.fstat(number).st_mode) and _is_read(number):
                    found[number] = os.lseek(number, 0, os.SEEK_CUR)
    return found


def reopen(positions: Mapping[int, int]) -> None:
    """In a fork, open these files anew, under the same descriptors and at these positions."""
    for number, position in positions.items():
        with suppress(OSError):  # it may not be opened again
            again = os.open(DESCRIPTORS / str(number), os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(again, position, os.SEEK_SET)
            os.dup2(again, number, inheritable=os.get_inheritable(number))
            os.close(again)


def _is_read(number: int) -> bool:
    """Whether a descriptor is only read from."""
    return fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
