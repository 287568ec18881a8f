"""Messages with tensors: the blob holds a JSON list of names, dtypes and shapes, and the bytes of each tensor.

Nothing received is executed.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import torch
from torch import Tensor

from weft.wire.channel import Bytes, Channel, Message, ProtocolError, open_channel

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.int64)}
"""Supported dtypes."""
ALIGNMENT = 8
SIZE = struct.Struct("<Q")
"""Length of the list, before it."""
MAX_TENSOR_BYTES = 1 << 44
"""Limit of all tensors of one message."""

Answer = tuple[Message, dict[str, Tensor]]


class TensorChannel:
    """A channel for messages with tensors. `request` waits for its answer without a timeout."""

    def __init__(self, channel: Channel):
        self.channel = channel

    @property
    def sent(self) -> int:
        return self.channel.sent

    @property
    def received(self) -> int:
        return self.channel.received

    def request(self, head: Message, tensors: dict[str, Tensor] | None = None) -> Answer:
        """Send a message and return the answer."""
        self.send(head, tensors)
        return self.receive()

    def send(self, head: Message, tensors: dict[str, Tensor] | None = None) -> None:
        self.channel.send(head, _pack(tensors) if tensors else (), timeout_s=None)

    def receive(self) -> Answer:
        head, blob = self.channel.receive(None, blob_limit=MAX_TENSOR_BYTES)
        return head, _unpack(blob) if blob else {}

    def close(self) -> None:
        """Close the channel and interrupt a thread in receive()."""
        self.channel.close()


def open_tensor_channel(address: str, secret: bytes, encrypt: bool = False, timeout_s: float = 10.0) -> TensorChannel:
    """Connect to a listener at host:port; see open_channel()."""
    host, _, port = address.rpartition(":")
    return TensorChannel(open_channel((host, int(port)), secret, timeout_s, None, encrypt))


def _pack(tensors: dict[str, Tensor]) -> list[Bytes]:
    held = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    listed = json.dumps([(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in held.items()]).encode()
    listed += b" " * (-len(listed) % ALIGNMENT)
    parts: list[Bytes] = [SIZE.pack(len(listed)) + listed]
    for tensor in held.values():
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        parts += [data, bytes(-len(data) % ALIGNMENT)]
    return parts


def _unpack(blob: bytearray) -> dict[str, Tensor]:
    """The tensors of a message, as views of the received bytes."""
    try:
        (size,) = SIZE.unpack_from(blob)
        listed = [(str(name), str(kind), [int(n) for n in shape]) for name, kind, shape in _list(blob, size)]
    except (struct.error, ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"an invalid list of tensors: {error}") from error
    out: dict[str, Tensor] = {}
    start = SIZE.size + size
    for name, kind, shape in listed:
        dtype = DTYPES.get(kind)
        if dtype is None or any(n < 0 for n in shape):
            raise ProtocolError(f"{name} has the invalid type {kind}{shape}")
        count = math.prod(shape)
        end = start + count * dtype.itemsize
        if end > len(blob):
            raise ProtocolError(f"the message ends before {name}, {kind}{shape}")
        out[name] = (
            torch.frombuffer(blob, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        ).view(shape)
        start = -(-end // ALIGNMENT) * ALIGNMENT
    return out


def _list(blob: bytearray, size: int) -> list[Any]:
    found = json.loads(bytes(blob[SIZE.size : SIZE.size + size]))
    if not isinstance(found, list):
        raise ValueError("no list")
    return found
