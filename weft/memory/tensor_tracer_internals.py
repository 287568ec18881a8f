"""Private torch names behind the tensor tracer: storages, operator names, and the two calls that bypass dispatch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "TorchDispatchMode",
    "device_query",
    "fake_tensors",
    "has_values",
    "known_device",
    "operator_name",
    "overloads",
    "patched",
    "quiet_tracing",
    "shaped",
    "storage_key",
    "tree_leaves",
    "tree_map",
]

device_query: Any = torch.ops.prim.device.default
"""What reading `tensor.device` dispatches for a tensor without data: half of all calls of a trace."""
cpu_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def fake_tensors() -> FakeTensorMode:
    """Inside it, tensors have shapes and no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def quiet_tracing() -> Iterator[None]:
    """An operator that fails on tensors without data raises its error, and torch does not print it too."""
    logger = logging.getLogger(fake_tensor.__name__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


_aten = torch.ops.aten
SHAPED = frozenset(
    {
        _aten.view.default, _aten.view.dtype, _aten._unsafe_view.default, _aten.alias.default, _aten.detach.default,
        _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.as_strided.default, _aten.slice.Tensor,
        _aten.select.int, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default, _aten.clone.default,
        _aten.mm.default, _aten.bmm.default,
    }
)  # fmt: skip
"""Operators that torch computes for tensors without data in C++: half of a trace."""


def shaped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The output of such an operator, in a third of the time that torch needs to look it up among earlier calls. None
    if torch must decide: for tensors with data or on several devices."""
    if func not in SHAPED or kwargs:
        return None
    first = args[0]
    if type(first) is not FakeTensor or first.constant is not None or first.fake_mode.in_kernel_invocation:
        return None
    for other in args[1:]:
        if isinstance(other, torch.Tensor) and (
            type(other) is not FakeTensor
            or other.fake_mode is not first.fake_mode
            or other.fake_device != first.fake_device
        ):
            return None
    with in_kernel_invocation_manager(first.fake_mode):
        out = func(*args)
    return FakeTensor(first.fake_mode, out, first.fake_device)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has data, and is not only traced."""
    return not isinstance(tensor, FakeTensor)


def known_device(tensor: torch.Tensor) -> torch.device:
    """The device of a tensor. Reading it directly of one without data would be dispatched like an operator."""
    if isinstance(tensor, FakeTensor) and not tensor.fake_mode.in_kernel_invocation:
        return tensor.fake_device
    return tensor.device


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that identifies a storage while it exists."""
    key: int = storage._cdata
    return key


def operator_name(func: Any) -> str:
    """The name of an operator without its namespace."""
    name: str = func._schema.name
    return name.partition("::")[2]


def overloads(func: Any) -> Any:
    """All overloads of an operator, the key of torch's table of FLOPs."""
    return func._overloadpacket


@contextmanager
def patched(resized: Callable[[torch.UntypedStorage], None], propagating: Callable[[bool], None]) -> Iterator[None]:
    """Report what a dispatch mode does not see: storages that are resized (FSDP2 frees gathered weights so), and when
    DTensor runs an operator on whole tensors without data to find its output's shape (True before, False after)."""
    resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        resized(storage)
        return out

    def propagate_(*args: Any, **kwargs: Any) -> Any:
        propagating(True)
        try:
            return propagate(*args, **kwargs)
        finally:
            propagating(False)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment,method-assign]
    ShardingPropagator._propagate_tensor_meta_non_cached = propagate_  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
