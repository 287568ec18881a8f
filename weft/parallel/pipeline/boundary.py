"""What passes between two stages: a tree of tensors and fixed values, sent as one tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.job.errors import JobError

ALIGNMENT = 16
"""Bytes to whose multiple each of several tensors of a message is padded."""

Layout = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


@dataclass(frozen=True)
class Boundary:
    """The values between two stages, for batches of one shape."""

    tree: Any
    """The nesting of tuples, lists and dicts; tensors are numbered."""
    tensors: tuple[Layout, ...]

    @classmethod
    def of(cls, value: Any) -> tuple[Boundary, list[Tensor]]:
        """The boundary that a value passes, and its tensors."""
        tensors: list[Tensor] = []
        tree = _describe(value, tensors)
        return cls(tree, tuple((tuple(t.shape), t.dtype) for t in tensors)), tensors

    @classmethod
    def single(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Boundary:
        """The boundary of one tensor."""
        return cls({"tensor": 0}, ((shape, dtype),))

    @property
    def trained(self) -> tuple[Layout, ...]:
        """The tensors that have gradients."""
        return tuple(layout for layout in self.tensors if layout[1].is_floating_point)

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """The value with these tensors."""
        return _rebuild(self.tree, tensors)

    def to_bytes(self) -> bytes:
        layouts = [[list(shape), str(dtype).removeprefix("torch.")] for shape, dtype in self.tensors]
        return json.dumps([self.tree, layouts]).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Boundary:
        tree, layouts = json.loads(content)
        return cls(tree, tuple((tuple(shape), getattr(torch, dtype)) for shape, dtype in layouts))


def message_layout(layouts: Sequence[Layout]) -> Layout:
    """Shape and dtype of the one tensor in which these are sent: itself, or bytes."""
    if len(layouts) == 1:
        return layouts[0]
    return (max(1, sum(_size(layout) for layout in layouts)),), torch.uint8


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with the content of several."""
    if len(tensors) == 1:
        return tensors[0]
    device = tensors[0].device if tensors else torch.device("cpu")
    out = torch.zeros(message_layout([(tuple(t.shape), t.dtype) for t in tensors])[0], dtype=torch.uint8, device=device)
    at = 0
    for t in tensors:
        size = t.numel() * t.element_size()
        out[at : at + size] = t.contiguous().reshape(-1).view(torch.uint8)
        at += _size((tuple(t.shape), t.dtype))
    return out


def unpack(message: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    """The tensors that were packed into a message."""
    if len(layouts) == 1:
        return [message]
    out, at = [], 0
    for shape, dtype in layouts:
        size = prod(shape) * dtype.itemsize
        out.append(message[at : at + size].view(dtype).view(shape))
        at += _size((shape, dtype))
    return out


def _size(layout: Layout) -> int:
    shape, dtype = layout
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [_describe(v, tensors) for v in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _describe(v, tensors) for key, v in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    raise JobError(
        f"a pipeline stage gives a {type(value).__name__} to the next one; tensors, numbers, and tuples, lists and "
        "dicts of them would work"
    )


def _rebuild(tree: Any, tensors: Sequence[Tensor]) -> Any:
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _rebuild(child, tensors) for key, child in content.items()}
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(_rebuild(child, tensors) for child in content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return tensors[0].device if tensors else torch.device(content)
    return content
