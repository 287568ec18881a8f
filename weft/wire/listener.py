"""A listening socket that accepts only processes with the run's secret."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from weft.job.errors import MachineError
from weft.wire.channel import ACK_TIMEOUT_S, Channel, Disconnected, accept_channel, close_socket

MAX_PENDING = 32
"""Limit of unauthenticated connections; above it the oldest is closed."""


class Listener:
    """Accepts connections at one address; each authenticated one is passed to `serve` in its own thread.

    Other connections are closed, and `note` is called once for each reason. The default address is loopback.
    """

    def __init__(
        self,
        secret: bytes,
        serve: Callable[[Channel], None],
        note: Callable[[str], None],
        host: str = "127.0.0.1",
        setting: str = "resilience.bind",
        ack_timeout_s: float | None = ACK_TIMEOUT_S,
        encrypt: bool = False,
    ):
        """setting: the job field of the host, for messages. ack_timeout_s, encrypt: see open_channel()."""
        self._secret, self._serve, self._note = secret, serve, note
        self._ack_timeout_s, self._encrypt = ack_timeout_s, encrypt
        self._pending: dict[socket.socket, float] = {}
        self._open: set[Channel] = set()
        self._noted: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._sock = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise MachineError(f"cannot listen at {host}: {error}; set {setting}") from error
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True, name="listener").start()

    def close(self) -> None:
        self._closed = True
        close_socket(self._sock)
        with self._lock:
            pending, channels = list(self._pending), list(self._open)
        for sock in pending:
            close_socket(sock)
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                if self._closed:
                    return
                self._note_once(f"a connection could not be accepted: {error}")  # for example too many open files
                time.sleep(0.05)
                continue
            with self._lock:
                self._pending[sock] = time.monotonic()
                oldest = (
                    min(self._pending, key=lambda s: self._pending[s]) if len(self._pending) > MAX_PENDING else None
                )
            if oldest is not None:
                self._note_once("many unauthenticated connections")
                close_socket(oldest)
            try:
                threading.Thread(target=self._handshake, args=(sock,), daemon=True, name="peer").start()
            except RuntimeError:  # no more threads
                self._forget(sock)
                close_socket(sock)

    def _handshake(self, sock: socket.socket) -> None:
        try:
            channel = accept_channel(sock, self._secret, self._ack_timeout_s, self._encrypt)
        except (OSError, ValueError) as error:
            self._note_once(f"a connection was dropped: {error}")
            close_socket(sock)
            return
        finally:
            self._forget(sock)
        with self._lock:
            self._open.add(channel)
        try:
            self._serve(channel)
        except Disconnected:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._note_once(f"a connection was dropped: {error!r}")
        finally:
            with self._lock:
                self._open.discard(channel)
            channel.close()

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._pending.pop(sock, None)

    def _note_once(self, text: str) -> None:
        with self._lock:
            if self._closed or text in self._noted or len(self._noted) >= 20:
                return
            self._noted.add(text)
        self._note(text)
