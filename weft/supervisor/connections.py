"""The connections of a mesh: counted from outside, and cut to wake up whoever waits for a rank that will not come."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from weft.mesh import Mesh


class Wires:
    """The sockets that a mesh opened. A rank in a Gloo collective can be interrupted only by closing what it waits on;
    those that merely wait for one another wake up in turn."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        self._opened: dict[int, int] | None = {}

    @contextmanager
    def opening(self) -> Iterator[None]:
        """The mesh is made inside: what is opened meanwhile is its own."""
        self._before, self._opened = _sockets(), None
        yield
        self._opened = self._new()

    def _new(self) -> dict[int, int]:
        return {fd: inode for fd, inode in _sockets().items() if self._before.get(fd) != inode}

    def cut(self) -> None:
        """Shut every connection, from any thread. The file descriptors stay with their owner."""
        opened = self._new() if self._opened is None else self._opened
        for fd, inode in opened.items():
            try:
                if os.fstat(fd).st_ino == inode:
                    _shut(fd)
            except OSError:  # closed meanwhile
                continue
        _abort_nccl()


def _sockets() -> dict[int, int]:
    """Open sockets, by file descriptor, with their inode: a number alone may be used again."""
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
    with socket.socket(fileno=os.dup(fd)) as wire:
        # Gloo aborts the process when its listener fails
        if wire.family in (socket.AF_INET, socket.AF_INET6) and not wire.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            wire.shutdown(socket.SHUT_RDWR)


def _abort_nccl() -> None:
    """NCCL waits on the device, where no socket is."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        from torch.distributed.distributed_c10d import _abort_process_group

        _abort_process_group()


class Watch:
    """What a mesh does, read from the heart's thread: nothing of it is on the way of training."""

    def __init__(self, mesh: Mesh):
        self.meter = mesh.meter
        everyone = {} if mesh.everyone is None else {"everyone": mesh.everyone}
        groups = {name: axis.group for name, axis in {**mesh.axes, **everyone}.items()}
        self.backends = [group._get_backend(mesh.device) for group in groups.values()]
        self.place = {name: i + 1 for i, name in enumerate(groups)}
        self.members = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}

    def __call__(self) -> tuple[int, int, list[int]]:
        counts = [backend._get_sequence_number_for_group() for backend in self.backends]  # type: ignore[attr-defined]
        return self.meter.number, self.place.get(self.meter.axis, 0), counts
