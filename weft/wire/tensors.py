"""Requests that carry tensors: a message whose blob is a list of what follows it, and the bytes of each tensor.

Nothing that arrives is ever executed: names, types and shapes are JSON, and the rest is numbers.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import torch
from torch import Tensor

from weft.wire.channel import Bytes, Channel, Message, Refused, dial

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.int64)}
"""What may travel."""
ALIGN = 8
SIZE = struct.Struct("<Q")
"""Before the list: its bytes."""
MOST = 1 << 44
"""Bytes of one message's tensors."""

Answer = tuple[Message, dict[str, Tensor]]


class Link:
    """A channel on which messages come with tensors.

    `request` waits for an answer, however long: it may depend on the work of everybody else.
    """

    def __init__(self, channel: Channel):
        self.channel = channel

    @property
    def sent(self) -> int:
        return self.channel.sent

    @property
    def received(self) -> int:
        return self.channel.received

    def request(self, head: Message, tensors: dict[str, Tensor] | None = None) -> Answer:
        """Send, and wait for the answer."""
        self.send(head, tensors)
        return self.receive()

    def send(self, head: Message, tensors: dict[str, Tensor] | None = None) -> None:
        self.channel.send(head, _pack(tensors) if tensors else (), timeout_s=None)

    def receive(self) -> Answer:
        head, blob = self.channel.receive(None, blob_limit=MOST)
        return head, _unpack(blob) if blob else {}

    def close(self) -> None:
        """Also wakes up whoever waits in receive()."""
        self.channel.close()


def connect(address: str, secret: bytes, timeout_s: float = 10.0) -> Link:
    """A link to a listener at host:port."""
    host, _, port = address.rpartition(":")
    return Link(dial((host, int(port)), secret, timeout_s, unheard_s=None))


def _pack(tensors: dict[str, Tensor]) -> list[Bytes]:
    held = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    listed = json.dumps([(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in held.items()]).encode()
    listed += b" " * (-len(listed) % ALIGN)
    parts: list[Bytes] = [SIZE.pack(len(listed)) + listed]
    for tensor in held.values():
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        parts += [data, bytes(-len(data) % ALIGN)]
    return parts


def _unpack(blob: bytearray) -> dict[str, Tensor]:
    """The tensors of a message, as views of what was read."""
    try:
        (size,) = SIZE.unpack_from(blob)
        listed = [(str(name), str(kind), [int(n) for n in shape]) for name, kind, shape in _list(blob, size)]
    except (struct.error, ValueError, TypeError, RecursionError) as error:
        raise Refused(f"a list of tensors that is none: {error}") from error
    out: dict[str, Tensor] = {}
    start = SIZE.size + size
    for name, kind, shape in listed:
        dtype = DTYPES.get(kind)
        if dtype is None or any(n < 0 for n in shape):
            raise Refused(f"{name} is said to be {kind}{shape}")
        count = math.prod(shape)
        end = start + count * dtype.itemsize
        if end > len(blob):
            raise Refused(f"{name} is said to be {kind}{shape}, and the message ends before")
        out[name] = (
            torch.frombuffer(blob, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        ).view(shape)
        start = -(-end // ALIGN) * ALIGN
    return out


def _list(blob: bytearray, size: int) -> list[Any]:
    found = json.loads(bytes(blob[SIZE.size : SIZE.size + size]))
    if not isinstance(found, list):
        raise ValueError("no list")
    return found
