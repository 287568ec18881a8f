"""Tensors and plain values of all data-parallel ranks, in lists, tuples and dicts, by the names of Accelerate."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from weft.mesh import Mesh
from weft.planner.plan import Plan

TAG = "__type__"


class DistributedOperationException(Exception):
    """The shapes of an operation's tensors differ between ranks."""


def on_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """A nested value with each tensor changed."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_tensors(change, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(on_tensors(change, item) for item in value)
    if hasattr(value, "items") and hasattr(value, "keys"):
        changed = {key: on_tensors(change, item) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(changed)
    return change(value) if isinstance(value, Tensor) else value


def shapes_of(value: Any) -> Any:
    """The nested shapes of a value's tensors, as JSON."""
    if isinstance(value, list | tuple):
        return [shapes_of(item) for item in value]
    if hasattr(value, "items") and hasattr(value, "keys"):
        return {str(key): shapes_of(item) for key, item in value.items()}
    return list(value.shape) if isinstance(value, Tensor) else None


def join(values: list[Any]) -> Any:
    """Batches one after the other: tensors along their first dimension, lists of other values as one list."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(join(list(items)) for items in zip(*values, strict=True)))
    if isinstance(first, list | tuple) and first and has_tensors(first):
        return type(first)(join(list(items)) for items in zip(*values, strict=True))
    if hasattr(first, "items") and hasattr(first, "keys"):
        joined = {key: join([value[key] for value in values]) for key in first}
        return joined if type(first) is dict else type(first)(joined)
    if isinstance(first, list | tuple):
        return type(first)(item for value in values for item in value)
    return first


def has_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(has_tensors(item) for item in value)
    if hasattr(value, "items") and hasattr(value, "keys"):
        return any(has_tensors(item) for item in value.values())
    return isinstance(value, Tensor)


def rows(value: Any, start: int, end: int) -> Any:
    """Samples of a batch."""
    if isinstance(value, list | tuple) and not has_tensors(value) and not hasattr(value, "_fields"):
        return value[start:end]
    return on_tensors(lambda tensor: tensor[start:end] if tensor.dim() else tensor, value)


def count_rows(value: Any) -> int:
    """Samples of a batch: the length of its first tensor, or of its list."""
    if isinstance(value, Tensor):
        return int(value.shape[0]) if value.dim() else 0
    if isinstance(value, list | tuple):
        if not has_tensors(value):
            return len(value)
        return next((count_rows(item) for item in value if has_tensors(item)), 0)
    if hasattr(value, "items") and hasattr(value, "keys"):
        return next((count_rows(item) for item in value.values() if has_tensors(item)), 0)
    return 0


def to_json(value: Any) -> Any:
    """A value as JSON from which of_json makes the same value: also tensors, arrays, tuples, sets, bytes and dicts with
    keys that are not text. What else there is, is a TypeError: nothing received is executed."""
    if value is None or isinstance(value, str | bool | int | float):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return {TAG: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "data": base64.b64encode(raw).decode()}
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return {TAG: "objects", "shape": list(value.shape), "items": [to_json(item) for item in value.flat]}
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": data}
    if isinstance(value, tuple | set | frozenset):
        return {
            TAG: type(value).__name__ if type(value) in (set, frozenset) else "tuple",
            "items": list(map(to_json, value)),
        }
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if hasattr(value, "items") and hasattr(value, "keys"):
        if all(isinstance(key, str) for key in value) and TAG not in value:
            return {key: to_json(item) for key, item in value.items()}
        return {TAG: "dict", "items": [[to_json(key), to_json(item)] for key, item in value.items()]}
    raise TypeError(f"ranks exchange numbers, texts, tensors, arrays, lists and dicts, not {type(value).__name__}")


def of_json(value: Any) -> Any:
    """The value that to_json described."""
    if isinstance(value, list):
        return [of_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: of_json(item) for key, item in value.items()}
    if kind == "bytes":
        return base64.b64decode(value["data"])
    if kind == "tensor":
        raw = bytearray(base64.b64decode(value["data"]))
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        dtype = getattr(torch, value["dtype"])
        assert isinstance(dtype, torch.dtype)
        return flat.view(dtype).reshape(value["shape"])
    if kind == "array":
        raw_array = np.frombuffer(base64.b64decode(value["data"]), dtype=np.dtype(value["dtype"]))
        return raw_array.reshape(value["shape"]).copy()
    if kind == "objects":
        array = np.empty(len(value["items"]), dtype=object)
        array[:] = [of_json(item) for item in value["items"]]
        return array.reshape(value["shape"])
    if kind == "dict":
        return {of_json(key): of_json(item) for key, item in value["items"]}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](of_json(item) for item in value["items"])


class RankValues:
    """Exchanges among the data-parallel ranks of a mesh; the ranks of tp hold the same values."""

    def __init__(self, plan: Plan, mesh: Mesh):
        self.plan, self.mesh, self.debug = plan, mesh, False
        """With `debug`, shapes are compared before each operation."""

    def _check(self, value: Any, operation: str) -> None:
        if not self.debug or self.plan.dp == 1:
            return
        shapes = self.mesh.all_gather_json(shapes_of(value))
        if any(shape != shapes[0] for shape in shapes):
            listed = "; ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
            raise DistributedOperationException(f"{operation} needs tensors of the same shape on all ranks: {listed}")

    def _gathered(self, value: Tensor) -> Tensor:
        value = value.detach()[None] if value.dim() == 0 else value.detach().contiguous()
        from_ranks = [torch.empty_like(value) for _ in range(self.mesh.world)]
        dist.all_gather(from_ranks, value)
        return torch.cat(from_ranks[:: self.plan.tp])

    def gather(self, value: Any) -> Any:
        """The tensors of all ranks, one after the other along the first dimension."""
        self._check(value, "gather")
        return value if self.plan.dp == 1 else on_tensors(self._gathered, value)

    def gather_object(self, value: Any) -> list[Any]:
        """The lists of all ranks as one list; of other values, the list of them."""
        if self.plan.dp == 1:
            return value if isinstance(value, list) else [value]
        lists = [of_json(item) for item in self.mesh.all_gather_json(to_json(value))][:: self.plan.tp]
        return [item for part in lists for item in part] if isinstance(value, list | tuple) else lists

    def broadcast(self, value: Any, from_process: int = 0) -> Any:
        """The tensors of one rank, on every rank."""
        self._check(value, "broadcast")
        if self.mesh.world == 1:
            return value

        def sent(tensor: Tensor) -> Tensor:
            tensor = tensor.detach().clone().contiguous()
            dist.broadcast(tensor, src=from_process)
            return tensor

        return on_tensors(sent, value)

    def broadcast_object(self, value: Any, from_process: int = 0) -> Any:
        """A plain value of one rank, on every rank."""
        mine = to_json(value) if self.mesh.rank == from_process else None
        return of_json(self.mesh.all_gather_json(mine)[from_process])

    def broadcast_object_list(self, values: list[Any], from_process: int = 0) -> list[Any]:
        """Replace the items of a list by those of one rank."""
        if self.mesh.world > 1:
            values[:] = self.broadcast_object(list(values), from_process)
        return values

    def reduce(self, value: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        """Sum, mean, maximum or minimum over ranks."""
        if reduction not in ("sum", "mean", "max", "min", "none"):
            raise ValueError(f"reduction={reduction!r} is not supported; sum, mean, max, min or none would work")
        self._check(value, "reduce")

        def reduced(tensor: Tensor) -> Tensor:
            stacked = self._gathered(tensor[None]) if self.plan.dp > 1 else tensor[None]
            if reduction in ("max", "min"):
                return (stacked.amax(0) if reduction == "max" else stacked.amin(0)) * scale
            if reduction == "none":
                return tensor
            return stacked.sum(dim=0) * scale / (self.plan.dp if reduction == "mean" else 1)

        return on_tensors(reduced, value)

    def pad(self, value: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors padded along a dimension, where they have it, to the largest size of all ranks."""
        if self.debug and self.plan.dp > 1:
            dims = self.mesh.all_gather_json([len(shape) for shape in _leaves(shapes_of(value))])
            if any(each != dims[0] for each in dims):
                raise DistributedOperationException(f"padding needs tensors of as many dimensions on all ranks: {dims}")

        def padded(tensor: Tensor) -> Tensor:
            if dim >= tensor.dim() or dim < -tensor.dim():
                return tensor
            size = tensor.shape[dim]
            shape = list(tensor.shape)
            shape[dim] = max(self.mesh.all_gather_json(size)) - size
            padding = tensor.new_full(shape, pad_index)
            return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim=dim)

        return on_tensors(padded, value)


def _leaves(shapes: Any) -> list[Any]:
    if isinstance(shapes, dict):
        return [leaf for item in shapes.values() for leaf in _leaves(item)]
    if isinstance(shapes, list) and shapes and not all(isinstance(item, int) for item in shapes):
        return [leaf for item in shapes for leaf in _leaves(item)]
    return [] if shapes is None else [shapes]
