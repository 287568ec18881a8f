"""Python objects from one rank or from all.

They travel in torch's file format and are read with weights_only: numbers, text, bytes, lists, tuples, sets, dicts,
tensors and numpy arrays keep their types. Other classes are refused, since reading them would run code that a sender
chooses; torch.serialization.add_safe_globals allows a class of one's own.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.extensions.adapters.hvd.differentiable import allgather, broadcast
from weft.extensions.adapters.hvd.operations import broadcast_
from weft.extensions.adapters.hvd.process_sets import ProcessSet, global_process_set
from weft.extensions.adapters.hvd.session import rank

NUMPY: list[Any] = [
    np.ndarray, np.dtype, np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0],  # rebuild arrays and numbers
    *(type(np.dtype(name)) for name in "?bBhHiIlLqQefdFD"),
]  # fmt: skip
FAILED = b"error: "
"""Begins the message of a rank whose object cannot be sent, so that no rank waits for it."""


def encode(value: Any) -> Tensor:
    """An object as bytes, or the reason why it cannot be sent."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        _decode(buffer.getvalue())
        message = buffer.getvalue()
    except Exception as error:  # whatever its class raises: no rank may wait for it
        text = (
            f"an object of type {type(value).__name__} cannot be sent ({_reason(error)}); numbers, text, lists, "
            "tuples, sets, dicts, tensors, numpy arrays and the classes of torch.serialization.add_safe_globals can"
        )
        message = FAILED + text.encode()
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def decode(message: Tensor) -> Any:
    """The object of a message."""
    data = message.numpy().tobytes()
    if data.startswith(FAILED):
        raise TypeError(data[len(FAILED) :].decode())
    return _decode(data)


def _decode(data: bytes) -> Any:
    with torch.serialization.safe_globals(NUMPY):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """The part of torch's message that names the class."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "GLOBAL" in line or "class" in line), lines[0] if lines else "").rstrip(".")


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of a rank, with its types. That rank gets the very object back."""
    mine = encode(obj) if rank() == root_rank else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(mine)])
    broadcast_(length, root_rank, name and f"{name}.size", process_set)
    message = mine if rank() == root_rank else torch.empty(int(length), dtype=torch.uint8)
    message = broadcast(message, root_rank, name, process_set)
    found = decode(message)
    return obj if rank() == root_rank else found


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, by rank, with their types."""
    mine = encode(obj)
    lengths = allgather(torch.tensor([len(mine)]), name and f"{name}.sizes", process_set)
    messages = allgather(mine, name, process_set).split(lengths.tolist())
    return [decode(message) for message in messages]
