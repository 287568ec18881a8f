"""Ranks in milliseconds: a process that has imported everything, and gives copies of itself to the guardian.

To import torch takes seconds and a core. The nursery does so once for all: every rank and spare, the first ones and
those that replace a dead one, is a fork of it. The fork's parent is the guardian, as if that had started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): orphans below this process become its children."""
ADOPTED_S = 10.0


class Child:
    """A fork of the nursery, as subprocess.Popen would show it. Until it is born the nursery stands for it: it goes
    with it, and its pid is the nursery's; signals wait."""

    def __init__(self, nursery: subprocess.Popen[bytes]):
        self._nursery: subprocess.Popen[bytes] | None = nursery
        self._waiting: list[int] = []
        self.pid = nursery.pid
        self.returncode: int | None = None

    def born(self, pid: int) -> None:
        self.pid, self._nursery = pid, None
        for number in self._waiting:
            self.send_signal(number)

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it."""
        if self.returncode is None and self._nursery is not None:
            self.returncode = self._nursery.poll()
        elif self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 1 << 8
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        if self._nursery is not None:
            self._waiting.append(number)
        elif self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The guardian's end of it. `start` starts the process, which finds its socket in WEFT_NURSERY."""

    def __init__(self, start: Callable[[dict[str, str], tuple[int, ...]], subprocess.Popen[bytes]]):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = start({"WEFT_NURSERY": str(theirs.fileno())}, (theirs.fileno(),))
        ours.setblocking(False)
        self._sock, self._expected = ours, dict[int, Child]()

    def ask(self, slot: int) -> Child:
        """A process for a slot; it comes as soon as the nursery has imported everything."""
        child = self._expected[slot] = Child(self.process)
        with contextlib.suppress(OSError):  # it is gone, which the child will say
            self._sock.send(str(slot).encode())
        return child

    def fileno(self) -> int:
        """Can be read when there are births."""
        return self._sock.fileno()

    def births(self) -> Iterator[tuple[int, int]]:
        """Slots and pids that are new."""
        with contextlib.suppress(OSError):
            while told := self._sock.recv(64):
                slot, pid = map(int, told.split())
                self._expected.pop(slot).born(pid)
                yield slot, pid

    def close(self) -> None:
        """End it; whoever was born before is a child like others."""
        self.process.kill()
        self.process.wait()
        for _ in self.births():
            pass
        self._sock.close()


@contextlib.contextmanager
def adopting() -> Iterator[bool]:
    """While this lasts, orphans below this process are its children; tells whether this system can do that."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    can = libc is not None and libc.prctl(SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield can
    finally:
        if can and libc is not None:
            libc.prctl(SUBREAPER, 0, 0, 0, 0)


def serve() -> bool:
    """In the nursery: wait for slots and fork. True in every fork, whose WEFT_SLOT is set as the guardian would have;
    False once the guardian is gone."""
    guardian = int(os.environ["WEFT_LAUNCHER"])
    with socket.socket(fileno=int(os.environ.pop("WEFT_NURSERY"))) as sock:
        while asked := sock.recv(64):
            pid = _fork_for(guardian)
            if pid == 0:
                os.environ["WEFT_SLOT"] = asked.decode()
                return True
            sock.send(f"{int(asked)} {pid}".encode())
    return False


def _fork_for(parent: int) -> int:
    """A fork whose parent is an ancestor of this process that adopts: returns its pid, and 0 in it."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid:
            os.write(write, str(pid).encode())
            os._exit(0)
        os.close(read)
        os.close(write)
        os.setsid()
        deadline = time.monotonic() + ADOPTED_S
        while os.getppid() != parent and time.monotonic() < deadline:
            time.sleep(0.001)
        return 0
    os.close(write)
    os.waitpid(between, 0)
    with os.fdopen(read) as pipe:
        return int(pipe.read())
