"""The sockets of a mesh: recorded when opened and shut down to interrupt ranks that wait for a lost peer."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from weft.supervisor.process_group_internals import abort_nccl


class MeshSockets:
    """The sockets that a mesh opened. Only shutting down its sockets interrupts a rank inside a Gloo collective; the
    interruption spreads to ranks that wait for that rank."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        self._opened: dict[int, int] | None = {}

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Record the sockets opened inside the block."""
        self._before, self._opened = _sockets(), None
        yield
        self._opened = self._new()

    def _new(self) -> dict[int, int]:
        return {fd: inode for fd, inode in _sockets().items() if self._before.get(fd) != inode}

    def shut_down(self) -> None:
        """Shut down every recorded socket, from any thread. File descriptors stay open for their owner."""
        opened = self._new() if self._opened is None else self._opened
        for fd, inode in opened.items():
            try:
                if os.fstat(fd).st_ino == inode:
                    _shut(fd)
            except OSError:  # already closed
                continue
        abort_nccl()


def _sockets() -> dict[int, int]:
    """Open sockets by file descriptor, with their inode, since descriptors are reused."""
    found = {}
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except (OSError, ValueError):
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def _shut(fd: int) -> None:
    with socket.socket(fileno=os.dup(fd)) as sock:
        # Gloo aborts the process when its listener fails
        if sock.family in (socket.AF_INET, socket.AF_INET6) and not sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            sock.shutdown(socket.SHUT_RDWR)
