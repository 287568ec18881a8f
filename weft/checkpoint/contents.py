"""What a checkpoint holds: this rank's chunks of the tensors, as they are when the save begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.comm.shards import local_of, shard_of


@dataclass(frozen=True)
class Chunk:
    """A box of a named tensor that one rank can write."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the full tensor."""
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def kind(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @classmethod
    def of_json(cls, row: Sequence[Any]) -> Chunk:
        name, dtype, shape, offset, size = row
        return cls(name, dtype, tuple(shape), tuple(offset), tuple(size))


class CheckpointContents:
    """This rank's chunks of some tensors, in host memory.

    Made in the caller's thread. An error here is raised by plan(), where it reaches all ranks: raised earlier, it would
    leave the others waiting. copy: the tensors will change while they are written.
    """

    def __init__(self, tensors: dict[str, Tensor], *, copy: bool) -> None:
        self.chunks: list[Chunk] = []
        self.tensors: list[Tensor] = []
        self.error: Exception | None = None
        try:
            for name, tensor in tensors.items():
                self._check(name, tensor)
                shard = shard_of(tensor)
                self._add(name, local_of(tensor.detach()), tuple(shard.shape), shard.offset)
            self.tensors = _on_host(self.tensors, copy=copy)
        except Exception as error:
            self.error = error

    def plan(self) -> list[tuple[Any, ...]]:
        """The chunks, for JSON."""
        if self.error is not None:
            raise self.error
        return [astuple(chunk) for chunk in self.chunks]

    def _add(self, name: str, tensor: Tensor, shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
        if tensor.numel() or not math.prod(shape):  # a rank that holds no element of a tensor writes nothing
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.chunks.append(Chunk(name, dtype, shape, offset, tuple(tensor.shape)))
            self.tensors.append(tensor)

    @staticmethod
    def _check(name: str, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                raise ValueError(f"{name!r} is a partial sum, {tensor.placements}; reduce it before it is saved")
            size, local = shard_of(tensor).size, tensor.to_local()
            if size != tuple(local.shape):
                raise ValueError(f"{name!r} should hold {list(size)} on this rank and holds {list(local.shape)}")


def _on_host(tensors: list[Tensor], *, copy: bool) -> list[Tensor]:
    """The tensors in host memory: copies where `copy` asks for them or the tensors are elsewhere."""
    moved = [tensor if tensor.is_cpu and not copy else _host_buffer(tensor) for tensor in tensors]
    devices = set()
    for tensor, host in zip(tensors, moved, strict=True):
        if host is not tensor:
            host.copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return moved


def _host_buffer(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        # Copies to pinned memory are several times faster, and torch reuses it at the next save. Plain memory is the
        # fallback where the system refuses to pin that much.
        with suppress(RuntimeError):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
