"""The fork server: a process that has imported torch and forks ranks in milliseconds.

Importing torch takes seconds of CPU. The fork server does it once; every rank and spare is a fork of it. A fork is
re-parented to the process manager, as if the manager had started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from weft.hardware.rank_environment import rank_info
from weft.supervisor.local_ranks import rank_module
from weft.supervisor.stop_signals import signals_blocked

WORKER = "weft.training.supervised_rank"
"""Module of a fork server, rank or spare, unless WEFT_RANK_MODULE names another."""
MAX_BEGIN_BYTES, MAX_HANDLES = 1 << 20, 64
"""Limits of the message that starts a run."""
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2) option: orphaned descendants become children of this process."""
REPARENT_TIMEOUT_S = 10.0


class ForkedProcess:
    """A forked process with the interface of subprocess.Popen. Until it has been forked, its pid and exit code are
    those of the fork server and signals are queued."""

    def __init__(self, fork_server: subprocess.Popen[bytes]):
        self._fork_server: subprocess.Popen[bytes] | None = fork_server
        self._waiting: list[int] = []
        self.pid = fork_server.pid
        self.returncode: int | None = None

    def started(self, pid: int) -> None:
        self.pid, self._fork_server = pid, None
        for number in self._waiting:
            self.send_signal(number)

    def poll(self) -> int | None:
        """The exit code, or minus the signal number."""
        if self.returncode is None and self._fork_server is not None:
            self.returncode = self._fork_server.poll()
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
        if self._fork_server is not None:
            self._waiting.append(number)
        elif self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The manager's side. It may be started before the run is known, because its imports take seconds."""

    def __init__(self, *arguments: str):
        """Start Python with these arguments; the process finds its socket in WEFT_FORK_SERVER."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = dict(os.environ)
        own = {"WEFT_LAUNCHER": str(os.getpid()), "WEFT_FORK_SERVER": str(theirs.fileno()), "PYTHONUNBUFFERED": "1"}
        environment = {"OMP_NUM_THREADS": "1", **self._environment, **own}  # each rank sets its thread count later
        with theirs, signals_blocked():  # a session of its own: Ctrl-C reaches only the manager, which forwards it once
            self.process = subprocess.Popen(
                [sys.executable, *arguments], env=environment, start_new_session=True, pass_fds=(theirs.fileno(),)
            )
        ours.setblocking(False)
        self._sock, self._expected = ours, dict[int, ForkedProcess]()

    def begin(self, run: Path, environment: Mapping[str, str], handles: Sequence[int] = ()) -> None:
        """Fork ranks of this run from now on, with this environment and these open files."""
        changed = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        removed = [name for name in self._environment if name not in environment]
        message = json.dumps({"run": str(run), "changed": changed, "removed": removed}).encode()
        with contextlib.suppress(ConnectionError):  # the server has exited, which poll() of its forks reports
            socket.send_fds(self._sock, [message], handles)

    def fork(self, slot: int) -> ForkedProcess:
        """Request a process for a slot; it is forked as soon as the imports are done."""
        child = self._expected[slot] = ForkedProcess(self.process)
        with contextlib.suppress(OSError):  # the server has exited, which poll() of the child reports
            self._sock.send(str(slot).encode())
        return child

    def fileno(self) -> int:
        """Readable when processes have been forked."""
        return self._sock.fileno()

    def new_processes(self) -> Iterator[tuple[int, int]]:
        """Slot and pid of each process forked since the last call."""
        with contextlib.suppress(OSError):
            while message := self._sock.recv(64):
                slot, pid = map(int, message.split())
                self._expected.pop(slot).started(pid)
                yield slot, pid

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    def close(self) -> None:
        """Stop the server; processes already forked keep running."""
        self.process.kill()
        self.process.wait()
        for _ in self.new_processes():
            pass
        self._sock.close()


def start_early(resilient: bool | None) -> ForkServer | None:
    """A fork server that imports torch while `weft train` plans; None where the run will not use one."""
    starts_ranks = not rank_info().joined and "NODE_RANK" not in os.environ
    used = sys.platform == "linux" and starts_ranks and resilient is not False
    return ForkServer("-m", rank_module(WORKER)) if used else None


@contextlib.contextmanager
def as_subreaper() -> Iterator[bool]:
    """Make orphaned descendants children of this process inside the block; yields whether the system supports it."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    can = libc is not None and libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield can
    finally:
        if can and libc is not None:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class NoFirstFork(Exception):
    """The system refuses processes from the start."""


def await_run() -> Path | None:
    """In the fork server: wait for `begin` and take its environment and open files. Returns the folder of the run, or
    None when the manager has exited."""
    with socket.socket(fileno=os.dup(int(os.environ["WEFT_FORK_SERVER"]))) as sock:
        try:
            message, handles, _, _ = socket.recv_fds(sock, MAX_BEGIN_BYTES, MAX_HANDLES)
        except ConnectionResetError:
            return None
    if not message:
        return None
    begin = json.loads(message)
    for handle in handles:
        os.set_inheritable(handle, True)
    for name in begin["removed"]:
        os.environ.pop(name, None)
    os.environ.update(begin["changed"])
    return Path(begin["run"])


def serve() -> bool:
    """In the fork server: fork on request. Returns True in each fork, with WEFT_SLOT set, and False when the manager
    has exited."""
    manager, forks = int(os.environ["WEFT_LAUNCHER"]), 0
    with socket.socket(fileno=int(os.environ.pop("WEFT_FORK_SERVER"))) as sock:
        while asked := _receive(sock):
            slot = asked.decode()
            try:
                forked = fork_for(manager, lambda pid: sock.send(f"{slot} {pid}".encode()))  # noqa: B023
            except ConnectionError:
                return False
            except OSError as error:
                if forks:
                    raise
                raise NoFirstFork from error
            forks += 1
            if forked:
                os.environ["WEFT_SLOT"] = slot
                return True
    return False


def _receive(sock: socket.socket) -> bytes:
    """The next message; empty when the other end has closed, or was killed before it read everything."""
    try:
        return sock.recv(64)
    except ConnectionResetError:
        return b""


def fork_for(parent: int, announce: Callable[[int], object]) -> bool:
    """Fork a process that is re-parented to `parent`. Returns whether this is the fork, which runs only after its pid
    was announced: if the server is killed before, nobody would know the fork, and it exits."""
    read, write = os.pipe()
    wait, go = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(write, str(pid).encode())
            os._exit(0)
        for handle in (read, write, go):
            os.close(handle)
        os.setsid()
        deadline = time.monotonic() + REPARENT_TIMEOUT_S
        while os.getppid() != parent and time.monotonic() < deadline:
            time.sleep(0.001)
        with os.fdopen(wait, "rb") as announced:
            if not announced.read():
                os._exit(0)
        return True
    os.close(write)
    os.close(wait)
    os.waitpid(between, 0)
    with os.fdopen(read) as pipe, os.fdopen(go, "wb") as announced:
        if not (pid_text := pipe.read()):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        announce(int(pid_text))
        announced.write(b"1")
    return False
