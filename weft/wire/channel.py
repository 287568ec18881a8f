"""Messages between the processes of a run: framed JSON, authenticated with the run's secret.

A connection starts with a challenge from each side, from which both derive keys unique to the connection; every frame
is signed together with its number. Frames cannot be forged, changed, replayed or moved to another connection. Only
JSON and bytes that the receiver asked for are read; nothing is ever unpickled. Messages are encrypted on request (TLS).
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

from weft.wire.tls import tls_context

MAGIC = b"weft-1\r\n"
NONCE, DIGEST = 32, 32
MAX_MESSAGE_BYTES = 1 << 20
"""Limit of a message; larger data follows it as a blob."""
HANDSHAKE_S = 3.0
"""Handshake timeout."""
ACK_TIMEOUT_S = 2.0
"""A connection with unacknowledged data for this long is closed and opened again."""
CHUNK = 1 << 20

Message = dict[str, Any]
Bytes = bytes | bytearray | memoryview
Blob = Bytes | Sequence[Bytes]
"""Bytes that follow a message, in one or several parts."""


class WireError(ConnectionError):
    """The peer has disconnected or is not authentic."""


class ProtocolError(WireError):
    """The peer does not hold the secret, or sent an invalid message."""


class Disconnected(WireError):
    """The peer closed the connection or was silent for too long."""


class Channel:
    """An authenticated connection, for one thread at a time; `sent` and `received` count bytes."""

    def __init__(self, sock: socket.socket, out_key: bytes, in_key: bytes):
        self._sock, self._out_key, self._in_key = sock, out_key, in_key
        self._sent_count = self._received_count = 0
        self.sent = self.received = 0
        self.peer = str(sock.getpeername()[0]) if sock.family in (socket.AF_INET, socket.AF_INET6) else "local"

    def send(self, message: Message, blob: Blob = (), timeout_s: float | None = 10.0) -> None:
        """Send one message and its blob. A timeout of None waits forever."""
        parts = [blob] if isinstance(blob, bytes | bytearray | memoryview) else blob
        if size := sum(map(len, parts)):
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part)
            message = {**message, "blob": {"bytes": size, "sha256": digest.hexdigest()}}
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(body)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
        frame = struct.pack("!I", len(body)) + _sign(self._out_key, self._sent_count, body) + body
        self._sent_count += 1
        self._sock.settimeout(timeout_s)
        try:
            self._sock.sendall(frame)
            for part in parts:
                view = memoryview(part)
                for start in range(0, len(view), CHUNK):
                    self._sock.sendall(view[start : start + CHUNK])
        except OSError as error:
            raise Disconnected(str(error)) from error
        self.sent += len(frame) + size

    def receive(self, timeout_s: float | None, blob_limit: int = 0) -> tuple[Message, bytearray]:
        """The next message, and its blob if that has at most `blob_limit` bytes."""
        length = struct.unpack("!I", self._read(4, timeout_s))[0]
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {length} bytes exceeds the limit")
        signature = self._read(DIGEST, HANDSHAKE_S)
        body = bytes(self._read(length, HANDSHAKE_S))
        if not hmac.compare_digest(signature, _sign(self._in_key, self._received_count, body)):
            raise ProtocolError("a message with a wrong signature")
        self._received_count += 1
        message = _parse(body)
        blob = bytearray()
        if (described := message.pop("blob", None)) is not None:
            try:
                size, digest = int(described["bytes"]), str(described["sha256"])
            except (KeyError, TypeError, ValueError, OverflowError):
                raise ProtocolError("a message with an invalid description of its bytes") from None
            if not 0 <= size <= blob_limit:
                raise ProtocolError(f"{size} bytes that were not requested")
            blob = self._read(size, timeout_s)
            if not hmac.compare_digest(hashlib.sha256(blob).hexdigest(), digest):
                raise ProtocolError("bytes with a wrong checksum")
        return message, blob

    def close(self) -> None:
        close_socket(self._sock)

    def _read(self, size: int, patience_s: float | None) -> bytearray:
        """Read `size` bytes within the timeout plus the time they take at 1 MB/s."""
        deadline = None if patience_s is None else time.monotonic() + patience_s + size / 1e6
        got = _read_until(self._sock, size, deadline)
        self.received += size
        return got


def open_channel(
    address: tuple[str, int], secret: bytes, timeout_s: float = 2.0, ack_timeout_s: float | None = ACK_TIMEOUT_S,
    encrypt: bool = False,
) -> Channel:  # fmt: skip
    """Connect to a listener; both sides prove that they hold the secret.

    ack_timeout_s: how long data may stay unacknowledged; None leaves it to the kernel. encrypt: as the listener.
    """
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise Disconnected(f"{address[0]}:{address[1]}: {error}") from error
    try:
        _set_options(sock, ack_timeout_s)
        if encrypt:
            sock.settimeout(HANDSHAKE_S)
            sock = tls_context(secret, server=False).wrap_socket(sock)
        deadline = time.monotonic() + HANDSHAKE_S
        hello = _read_until(sock, len(MAGIC) + NONCE, deadline)
        if hello[: len(MAGIC)] != MAGIC:
            raise ProtocolError("not a listener of Weft")
        theirs, ours = bytes(hello[len(MAGIC) :]), secrets.token_bytes(NONCE)
        sock.sendall(MAGIC + ours + _prove(secret, b"client", theirs, ours))
        if not hmac.compare_digest(_read_until(sock, DIGEST, deadline), _prove(secret, b"server", theirs, ours)):
            raise ProtocolError("the listener does not have the secret")
        return Channel(sock, _prove(secret, b"to-server", theirs, ours), _prove(secret, b"to-client", theirs, ours))
    except BaseException as error:
        close_socket(sock)
        if isinstance(error, OSError) and not isinstance(error, ProtocolError | Disconnected):
            raise Disconnected(str(error)) from error
        raise


def accept_channel(
    sock: socket.socket, secret: bytes, ack_timeout_s: float | None = ACK_TIMEOUT_S, encrypt: bool = False
) -> Channel:
    """The listener's half of open_channel()."""
    _set_options(sock, ack_timeout_s)
    sock.settimeout(HANDSHAKE_S)
    if encrypt:
        sock = tls_context(secret, server=True).wrap_socket(sock, server_side=True)
    deadline = time.monotonic() + HANDSHAKE_S
    ours = secrets.token_bytes(NONCE)
    sock.sendall(MAGIC + ours)
    answer = _read_until(sock, len(MAGIC) + NONCE + DIGEST, deadline)
    theirs, proof = bytes(answer[len(MAGIC) : len(MAGIC) + NONCE]), answer[len(MAGIC) + NONCE :]
    if answer[: len(MAGIC)] != MAGIC or not hmac.compare_digest(proof, _prove(secret, b"client", ours, theirs)):
        raise ProtocolError("the peer does not have the secret")
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
        raise ProtocolError("a message that is not JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("a message that is not a JSON object")
    return message


def _read_until(sock: socket.socket, size: int, deadline: float | None) -> bytearray:
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise Disconnected("no data within the timeout")
        sock.settimeout(left)
        try:
            count = sock.recv_into(view[got:], min(size - got, CHUNK))
        except OSError as error:
            raise Disconnected(str(error)) from error
        if not count:
            raise Disconnected("it closed the connection")
        got += count
    return buffer


def _set_options(sock: socket.socket, ack_timeout_s: float | None) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if ack_timeout_s is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * ack_timeout_s))


def close_socket(sock: socket.socket) -> None:
    """Close the socket and interrupt threads that wait on it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        sock.close()
