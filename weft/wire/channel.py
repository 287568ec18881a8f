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
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

MAGIC = b"weft-1\r\n"
NONCE, DIGEST = 32, 32
LIMIT = 1 << 20
"""Bytes of the longest message; what is larger travels behind one, as its blob."""
HANDSHAKE_S = 3.0
"""A stranger who has not shown the secret by then is dropped, however slowly he types."""
UNHEARD_S = 2.0
"""A link on which nothing is acknowledged for so long is dead, and dialled anew, not after the kernel's patience."""
CHUNK = 1 << 20

Message = dict[str, Any]
Bytes = bytes | bytearray | memoryview
Blob = Bytes | Sequence[Bytes]
"""Bytes that travel behind a message, in one piece or several."""


class WireError(ConnectionError):
    """The other side is gone, or is not who it should be."""


class Refused(WireError):
    """The other side does not hold the secret, or what it sent is not what it signed."""


class Gone(WireError):
    """The other side has closed the connection, or said nothing for too long."""


class Channel:
    """A connection whose other side has shown the secret; for one thread at a time; `sent` and `received` are bytes."""

    def __init__(self, sock: socket.socket, out_key: bytes, in_key: bytes):
        self._sock, self._out_key, self._in_key = sock, out_key, in_key
        self._told = self._heard = 0
        self.sent = self.received = 0
        self.peer = str(sock.getpeername()[0]) if sock.family in (socket.AF_INET, socket.AF_INET6) else "local"

    def send(self, message: Message, blob: Blob = (), timeout_s: float | None = 10.0) -> None:
        """One message, and the bytes that belong to it. None waits as long as it takes."""
        parts = [blob] if isinstance(blob, bytes | bytearray | memoryview) else blob
        if size := sum(map(len, parts)):
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part)
            message = {**message, "blob": {"bytes": size, "sha256": digest.hexdigest()}}
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > LIMIT:
            raise ValueError(f"a message of {len(body)} bytes is longer than the {LIMIT} that anyone reads")
        frame = struct.pack("!I", len(body)) + _sign(self._out_key, self._told, body) + body
        self._told += 1
        self._sock.settimeout(timeout_s)
        try:
            self._sock.sendall(frame)
            for part in parts:
                view = memoryview(part)
                for start in range(0, len(view), CHUNK):
                    self._sock.sendall(view[start : start + CHUNK])
        except OSError as error:
            raise Gone(str(error)) from error
        self.sent += len(frame) + size

    def receive(self, timeout_s: float | None, blob_limit: int = 0) -> tuple[Message, bytearray]:
        """The next message, and its blob if one of so many bytes is welcome here."""
        length = struct.unpack("!I", self._read(4, timeout_s))[0]
        if length > LIMIT:
            raise Refused(f"a message of {length} bytes")
        signature = self._read(DIGEST, HANDSHAKE_S)
        body = bytes(self._read(length, HANDSHAKE_S))
        if not hmac.compare_digest(signature, _sign(self._in_key, self._heard, body)):
            raise Refused("a message whose signature is wrong")
        self._heard += 1
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
        shut(self._sock)

    def _read(self, size: int, patience_s: float | None) -> bytearray:
        """So many bytes, none of which may keep us waiting longer than that, all together not much longer."""
        deadline = None if patience_s is None else time.monotonic() + patience_s + size / 1e6
        got = _read_until(self._sock, size, deadline)
        self.received += size
        return got


def dial(
    address: tuple[str, int], secret: bytes, timeout_s: float = 2.0, unheard_s: float | None = UNHEARD_S
) -> Channel:
    """Connect to a listener, show it the secret, and have it show that it holds it too.

    unheard_s: how long bytes may stay unacknowledged; None leaves it to the kernel.
    """
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise Gone(f"{address[0]}:{address[1]}: {error}") from error
    try:
        _tune(sock, unheard_s)
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
        shut(sock)
        if isinstance(error, OSError) and not isinstance(error, Refused | Gone):
            raise Gone(str(error)) from error
        raise


def welcome(sock: socket.socket, secret: bytes, unheard_s: float | None = UNHEARD_S) -> Channel:
    """The listener's half of dial()."""
    _tune(sock, unheard_s)
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


def _read_until(sock: socket.socket, size: int, deadline: float | None) -> bytearray:
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
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


def _tune(sock: socket.socket, unheard_s: float | None) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if unheard_s is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unheard_s))


def shut(sock: socket.socket) -> None:
    """Close it, which also wakes up whoever waits for it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        sock.close()
