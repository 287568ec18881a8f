"""Messages between processes that come and go: a little JSON and some tensors over a socket, each signed.

Both sides know the run's secret. A connection begins with a nonce from each side; every message carries a keyed hash of
itself, the two nonces and its number, so that nothing foreign, changed, repeated or out of order is taken for one.
Nothing that arrives is ever executed. The secret is not sent; what is sent can be read by who can listen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import socket
import struct
from typing import Any

import torch
from torch import Tensor

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.int64)}
"""What may travel."""
ALIGN = 8
SIZES = struct.Struct("<IQ")
"""Before each message: bytes of its JSON and of its tensors."""
MAC_BYTES, NONCE_BYTES = 32, 16
FIRST_LIMIT = 1 << 16
"""Bytes that a peer may send before it has shown that it knows the secret."""
TEXT_LIMIT = 1 << 26

Message = tuple[dict[str, Any], dict[str, Tensor]]


class WireError(ConnectionError):
    """The other side is gone, or is not who it should be."""


class Link:
    """One connection. `request` waits for an answer; `sent` and `received` count bytes."""

    def __init__(self, sock: socket.socket, secret: bytes, asks: bool):
        """`asks` on the side that connected: the two directions are signed differently."""
        self.sock, self.asks = sock, asks
        self.sent = self.received = 0
        self._numbers = [0, 0]
        with contextlib.suppress(OSError):  # not every socket is TCP's
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = secrets.token_bytes(NONCE_BYTES)
        try:
            sock.sendall(mine)
            theirs = bytes(self._read(NONCE_BYTES))
        except OSError as error:
            raise WireError(str(error)) from error
        nonces = mine + theirs if asks else theirs + mine
        self._key = hashlib.blake2b(nonces, key=secret, digest_size=32).digest()

    def request(self, head: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Message:
        """Send, and wait for the answer."""
        self.send(head, tensors)
        return self.receive()

    def send(self, head: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> None:
        held = {n: t.detach().cpu().contiguous() for n, t in (tensors or {}).items()}
        listed = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in held.items()]
        text = json.dumps({"head": head, "tensors": listed}, allow_nan=True).encode()
        parts = [_bytes(t) for t in held.values()]
        sizes = SIZES.pack(len(text), sum(map(_padded, parts)))
        mac = self._mac(sending=True)
        try:
            for part in (sizes, text, *(x for p in parts for x in (p, bytes(_padded(p) - len(p))))):
                mac.update(part)
                self.sock.sendall(part)
                self.sent += len(part)
            self.sock.sendall(mac.digest())
        except OSError as error:
            raise WireError(str(error)) from error

    def receive(self) -> Message:
        try:
            sizes = self._read(SIZES.size)
            text_size, size = SIZES.unpack(sizes)
            first = self._numbers[0] == 0
            if text_size > TEXT_LIMIT or (first and text_size + size > FIRST_LIMIT):
                raise WireError(f"a message of {text_size + size} bytes is too large to be one of ours")
            text, payload = self._read(text_size), self._read(size)
            mac = self._mac(sending=False)
            for part in (sizes, text, payload):
                mac.update(part)
            if not secrets.compare_digest(mac.digest(), bytes(self._read(MAC_BYTES))):
                raise WireError("a message is not signed with this run's secret")
        except OSError as error:
            raise WireError(str(error)) from error
        content = json.loads(bytes(text))
        return content["head"], _tensors(content["tensors"], payload)

    def close(self) -> None:
        """Also wakes up whoever waits in receive()."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _mac(self, sending: bool) -> Any:
        number = self._numbers[sending]
        self._numbers[sending] += 1
        way = b"ask" if sending == self.asks else b"answer"
        return hashlib.blake2b(way + struct.pack("<Q", number), key=self._key, digest_size=MAC_BYTES)

    def _read(self, size: int) -> bytearray:
        out = bytearray(size)
        view, held = memoryview(out), 0
        while held < size:
            got = self.sock.recv_into(view[held:])
            if not got:
                raise WireError("the other side closed the connection")
            held += got
        self.received += size
        return out


def _padded(part: memoryview) -> int:
    return -(-len(part) // ALIGN) * ALIGN


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _tensors(listed: list[list[Any]], payload: bytearray) -> dict[str, Tensor]:
    """The tensors of a message, as views of what was read."""
    out: dict[str, Tensor] = {}
    start = 0
    for name, kind, shape in listed:
        dtype = DTYPES.get(kind)
        if dtype is None or any(not isinstance(n, int) or n < 0 for n in shape):
            raise WireError(f"{name} is said to be {kind}{shape}")
        count = torch.Size(shape).numel()
        end = start + count * dtype.itemsize
        if end > len(payload):
            raise WireError(f"{name} is said to be {kind}{shape}, and the message ends before")
        out[name] = (
            torch.frombuffer(payload, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        ).view(shape)
        start = -(-end // ALIGN) * ALIGN
    return out


def connect(address: str, secret: bytes, timeout_s: float | None = None) -> Link:
    """A link to a listener at host:port."""
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host, int(port)), timeout=timeout_s)
        sock.settimeout(None)
    except OSError as error:
        raise WireError(f"{address}: {error}") from error
    return Link(sock, secret, asks=True)
