"""Who listens at a socket for the processes of its run, and drops everybody else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from weft.job.errors import MachineError
from weft.wire.channel import UNHEARD_S, Channel, Gone, shut, welcome

PENDING = 32
"""Strangers that are listened to at once; one more, and the oldest is dropped."""


class Listener:
    """Accepts connections at one address; `serve` gets each that has shown the secret, in a thread of its own.

    Whoever has not is dropped, and `note` is told once for each kind of trouble. The default address is this machine's
    own, which no other can reach.
    """

    def __init__(
        self,
        secret: bytes,
        serve: Callable[[Channel], None],
        note: Callable[[str], None],
        host: str = "127.0.0.1",
        setting: str = "resilience.bind",
        unheard_s: float | None = UNHEARD_S,
    ):
        """setting: where the job names the host. unheard_s: as of dial()."""
        self._secret, self._serve, self._note, self._unheard_s = secret, serve, note, unheard_s
        self._pending: dict[socket.socket, float] = {}
        self._open: set[Channel] = set()
        self._noted: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._sock = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise MachineError(f"no socket can be opened at {host}: {error}; set {setting}") from error
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True, name="listener").start()

    def close(self) -> None:
        self._closed = True
        shut(self._sock)
        with self._lock:
            pending, channels = list(self._pending), list(self._open)
        for sock in pending:
            shut(sock)
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if self._closed:
                    return
                self._say_once(f"a connection could not be accepted: {error}")  # too many open files, say
                time.sleep(0.05)
                continue
            with self._lock:
                self._pending[sock] = time.monotonic()
                oldest = min(self._pending, key=lambda s: self._pending[s]) if len(self._pending) > PENDING else None
            if oldest is not None:
                self._say_once("many connections that show no secret")
                shut(oldest)
            try:
                threading.Thread(target=self._talk, args=(sock,), daemon=True, name="peer").start()
            except RuntimeError:  # no more threads
                self._forget(sock)
                shut(sock)

    def _talk(self, sock: socket.socket) -> None:
        try:
            channel = welcome(sock, self._secret, self._unheard_s)
        except (OSError, ValueError) as error:
            self._say_once(f"a connection was dropped: {error}")
            shut(sock)
            return
        finally:
            self._forget(sock)
        with self._lock:
            self._open.add(channel)
        try:
            self._serve(channel)
        except Gone:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._say_once(f"a connection was dropped: {error!r}")
        finally:
            with self._lock:
                self._open.discard(channel)
            channel.close()

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._pending.pop(sock, None)

    def _say_once(self, text: str) -> None:
        with self._lock:
            if self._closed or text in self._noted or len(self._noted) >= 20:
                return
            self._noted.add(text)
        self._note(text)
