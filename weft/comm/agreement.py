"""Agreement over a group: JSON values of all ranks, or of the first, on every rank.

Values travel as UTF-8 text in byte tensors. torch's object collectives unpickle what they receive, so a sender to a
rank's socket could run code in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weft.comm.axis import native_all_gather
from weft.job.errors import describe_file_error

T = TypeVar("T")

HEADER_BYTES, INLINE_BYTES = 8, 1024
"""Every message begins with its length; one of at most INLINE_BYTES, header included, needs a single collective."""


def encode_json(value: object) -> bytes:
    """A JSON value as text. Tuples become lists; what JSON cannot express is a TypeError."""
    _check(value)
    return json.dumps(value, separators=(",", ":")).encode()


def _check(value: object) -> None:
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"ranks exchange JSON, whose keys are text, not {wrong[0]!r}")
        for each in value.values():
            _check(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _check(each)
    elif value is not None and not isinstance(value, str | bool | int | float):
        raise TypeError(f"ranks exchange JSON, which has no {type(value).__name__}")


def all_gather_json(value: object, group: dist.ProcessGroup | None) -> list[Any]:
    """The value of every rank of a group on CPU tensors, by rank; without a group, of this process alone."""
    text = encode_json(value)
    if group is None:
        return [json.loads(text)]
    world = dist.get_world_size(group)
    found = _gather_rows(len(text).to_bytes(HEADER_BYTES, "little") + text, INLINE_BYTES, group, world)
    sizes = [int.from_bytes(row[:HEADER_BYTES], "little") for row in found]
    if max(sizes) > INLINE_BYTES - HEADER_BYTES:
        found = [bytes(HEADER_BYTES) + row for row in _gather_rows(text, max(sizes), group, world)]
    return [json.loads(row[HEADER_BYTES : HEADER_BYTES + size]) for row, size in zip(found, sizes, strict=True)]


def _gather_rows(text: bytes, width: int, group: dist.ProcessGroup, world: int) -> list[bytes]:
    """The first `width` bytes of every rank's text, padded."""
    mine = torch.frombuffer(bytearray(text[:width].ljust(width, b"\0")), dtype=torch.uint8)
    out = torch.empty(world * width, dtype=torch.uint8)
    native_all_gather(out, mine, group=group)
    return [row.numpy().tobytes() for row in out.view(world, width)]


class Agreement:
    """The ranks of a group; without one, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        return all_gather_json(value, self.group)

    def first(self, ask: Callable[[], T], failed: Callable[[str], Exception]) -> T:
        """The value that rank 0 computes, on every rank; if that fails, all ranks raise `failed(message)`."""
        answer: tuple[Any, str | None] = (None, None)
        if self.rank == 0:
            try:
                answer = (ask(), None)
            except Exception as error:
                answer = (None, error_text(error))
        value, why = all_gather_json(answer, self.group)[0]
        if why is not None:
            raise failed(why)
        return value


def error_text(error: BaseException) -> str:
    """An error in one line: its type and message; of a file, which one and what would work."""
    if isinstance(error, OSError) and error.errno is not None:
        return describe_file_error(error)
    return f"{type(error).__name__}: {error}"
