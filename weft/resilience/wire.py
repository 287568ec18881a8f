"""Messages between the processes of a run: framed JSON that only holders of the run's secret can write.

A connection begins with a challenge from either side, from which both derive keys that no other connection has; every
frame is signed with its number in the connection. So nothing can be forged, changed, repeated or moved elsewhere. Only
JSON is read, and bytes that the receiver asked for: nothing that comes from a network is ever unpickled. It is not
encrypted: who listens on the network reads along.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.job.errors import MachineError

MAGIC = b"weft-1\r\n"
NONCE, DIGEST = 32, 32
LIMIT = 1 << 20
"""Bytes of the longest message; what is larger travels behind one, as its blob."""
HANDSHAKE_S = 3.0
"""A stranger who has not shown the secret by then is dropped, however slowly he types."""
PENDING = 32
"""Strangers that are listened to at once; one more, and the oldest is dropped."""
CHUNK = 1 << 20

Message = dict[str, Any]


class Refused(ConnectionError):
    """The other side does not hold the secret, or what it sent is not what it signed."""


class Gone(ConnectionError):
    """The other side has closed the connection, or said nothing for too long."""


def run_secret(folder: Path) -> bytes:
    """The secret of a run: WEFT_SECRET, or a file that only its owner can read, made by whoever comes first."""
    if given := os.environ.get("WEFT_SECRET"):
        if len(given) < 32:
            raise MachineError(
                f"WEFT_SECRET has {len(given)} characters; at least 32 are needed (openssl rand -hex 32)"
            )
        return given.encode()
    path = folder / ".secret"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        draft = folder / f".secret-{secrets.token_hex(8)}"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(draft, path)  # with its content, or not at all
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    mode = path.lstat()
    if not stat.S_ISREG(mode.st_mode) or mode.st_mode & 0o077 or mode.st_uid != os.geteuid():
        raise MachineError(f"{path} must be a file of yours that nobody else can read: chmod 600 it, or delete it")
    return path.read_bytes()


class Channel:
    """A connection whose other side has shown the secret; for one thread at a time."""

    def __init__(self, sock: socket.socket, out_key: bytes, in_key: bytes):
        self._sock, self._out_key, self._in_key = sock, out_key, in_key
        self._sent = self._received = 0
        self.peer = str(sock.getpeername()[0]) if sock.family in (socket.AF_INET, socket.AF_INET6) else "local"

    def send(self, message: Message, blob: bytes | memoryview = b"", timeout_s: float = 10.0) -> None:
        """One message, and the bytes that belong to it."""
        if len(blob):
            message = {**message, "blob": {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}}
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > LIMIT:
            raise ValueError(f"a message of {len(body)} bytes is longer than the {LIMIT} that anyone reads")
        frame = struct.pack("!I", len(body)) + _sign(self._out_key, self._sent, body) + body
        self._sent += 1
        self._sock.settimeout(timeout_s)
        try:
            self._sock.sendall(frame)
            for start in range(0, len(blob), CHUNK):
                self._sock.sendall(blob[start : start + CHUNK])
        except OSError as error:
            raise Gone(str(error)) from error

    def receive(self, timeout_s: float, blob_limit: int = 0) -> tuple[Message, bytearray]:
        """The next message, and its blob if one of so many bytes is welcome here."""
        length = struct.unpack("!I", self._read(4, timeout_s))[0]
        if length > LIMIT:
            raise Refused(f"a message of {length} bytes")
        signature = self._read(DIGEST, HANDSHAKE_S)
        body = bytes(self._read(length, HANDSHAKE_S))
        if not hmac.compare_digest(signature, _sign(self._in_key, self._received, body)):
            raise Refused("a message whose signature is wrong")
        self._received += 1
        message = _parse(body)
        blob = bytearray()
        if (described := message.pop("blob", None)) is not None:
            size, digest = int(described["bytes"]), str(described["sha256"])
            if not 0 <= size <= blob_limit:
                raise Refused(f"{size} bytes that nobody asked for")
            blob = self._read(size, timeout_s)
            if not hmac.compare_digest(hashlib.sha256(blob).hexdigest(), digest):
                raise Refused("bytes that are not those that were signed")
        return message, blob

    def close(self) -> None:
        _shut(self._sock)

    def _read(self, size: int, patience_s: float) -> bytearray:
        return _read(self._sock, size, patience_s)


def dial(address: tuple[str, int], secret: bytes, timeout_s: float = 2.0) -> Channel:
    """Connect to a listener, show it the secret, and have it show that it holds it too."""
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise Gone(f"{address[0]}:{address[1]}: {error}") from error
    try:
        _tune(sock)
        deadline = time.monotonic() + HANDSHAKE_S
        hello = _read_until(sock, len(MAGIC) + NONCE, deadline)
        if hello[: len(MAGIC)] != MAGIC:
            raise Refused("it does not speak our language")
        theirs, ours = bytes(hello[len(MAGIC) :]), secrets.token_bytes(NONCE)
        sock.sendall(MAGIC + ours + _prove(secret, b"client", theirs, ours))
        if not hmac.compare_digest(_read_until(sock, DIGEST, deadline), _prove(secret, b"server", theirs, ours)):
            raise Refused("the listener does not hold the secret")
        return Channel(sock, _prove(secret, b"to-server", theirs, ours), _prove(secret, b"to-client", theirs, ours))
    except BaseException as error:
        _shut(sock)
        if isinstance(error, OSError) and not isinstance(error, Refused | Gone):
            raise Gone(str(error)) from error
        raise


def _welcome(sock: socket.socket, secret: bytes) -> Channel:
    """The listener's half of dial()."""
    _tune(sock)
    deadline = time.monotonic() + HANDSHAKE_S
    ours = secrets.token_bytes(NONCE)
    sock.settimeout(HANDSHAKE_S)
    sock.sendall(MAGIC + ours)
    answer = _read_until(sock, len(MAGIC) + NONCE + DIGEST, deadline)
    theirs, proof = bytes(answer[len(MAGIC) : len(MAGIC) + NONCE]), answer[len(MAGIC) + NONCE :]
    if answer[: len(MAGIC)] != MAGIC or not hmac.compare_digest(proof, _prove(secret, b"client", ours, theirs)):
        raise Refused("it does not hold the secret")
    sock.sendall(_prove(secret, b"server", ours, theirs))
    return Channel(sock, _prove(secret, b"to-client", ours, theirs), _prove(secret, b"to-server", ours, theirs))


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
    ):
        self._secret, self._serve, self._note = secret, serve, note
        self._pending: dict[socket.socket, float] = {}
        self._open: set[Channel] = set()
        self._noted: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._sock = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise MachineError(f"no socket can be opened at {host}: {error}; set resilience.bind") from error
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True, name="listener").start()

    def close(self) -> None:
        self._closed = True
        _shut(self._sock)
        with self._lock:
            pending, channels = list(self._pending), list(self._open)
        for sock in pending:
            _shut(sock)
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
                _shut(oldest)
            try:
                threading.Thread(target=self._talk, args=(sock,), daemon=True, name="peer").start()
            except RuntimeError:  # no more threads
                self._forget(sock)
                _shut(sock)

    def _talk(self, sock: socket.socket) -> None:
        try:
            channel = _welcome(sock, self._secret)
        except (OSError, ValueError) as error:
            self._say_once(f"a connection was dropped: {error}")
            _shut(sock)
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


def _sign(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, struct.pack("!Q", number) + body, "sha256")


def _prove(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + role + b"\0" + server_nonce + client_nonce, "sha256")


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused("a message that is no JSON") from error
    if not isinstance(message, dict):
        raise Refused("a message that is no object")
    return message


def _read(sock: socket.socket, size: int, patience_s: float) -> bytearray:
    """So many bytes, none of which may keep us waiting longer than that, all together not much longer."""
    return _read_until(sock, size, time.monotonic() + patience_s + size / 1e6)


def _read_until(sock: socket.socket, size: int, deadline: float) -> bytearray:
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise Gone("it was silent for too long")
        sock.settimeout(left)
        try:
            count = sock.recv_into(view[got:], min(size - got, CHUNK))
        except OSError as error:
            raise Gone(str(error)) from error
        if not count:
            raise Gone("it closed the connection")
        got += count
    return buffer


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # a dead link is dialled anew at once, not after the kernel's patience
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        sock.close()
