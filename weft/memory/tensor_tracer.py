"""A tracer of live tensor bytes and their peak, FLOPs, and collectives with their bytes.

It counts tensors, not other memory of kernels or the process. Fake tensors count as real.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from weft.comm.dtensor_internals import local_tensor
from weft.memory.tensor_tracer_internals import (
    TorchDispatchMode,
    cpu_attention,
    cpu_attention_backward,
    device_query,
    known_device,
    operator_name,
    overloads,
    patched,
    shaped,
    storage_key,
    tree_leaves,
)

COLLECTIVES: dict[str, tuple[str, int]] = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}
"""Collectives by torch's name: our name, and the index of the argument that is the whole tensor."""


class Tracer(TorchDispatchMode):
    """Counts tensors, FLOPs and collectives inside its context. `groups` maps process groups to axis names; others are
    `other`. `copied` are collectives whose tensors the traced backend would copy first."""

    def __init__(self, groups: dict[str, str] | None = None, copied: frozenset[str] = frozenset()):
        super().__init__()
        self.groups, self.copied = groups or {}, copied
        self.live = self.peak = 0
        self.counting = True
        self.flops = 0.0
        self.allocated = 0
        """Bytes of all tensors that were made, also of those that are gone."""
        self.operators = 0
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.sizes: dict[int, int] = {}
        self.blind = 0
        """How many shape propagations of DTensor are running, whose tensors are not real."""
        self._patches = ExitStack()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that existed before."""
        for tensor in tensors:
            self._see(tensor)

    def start(self) -> None:
        """Reset the figures; live tensors stay counted."""
        self.peak, self.flops, self.counting = self.live, 0.0, True
        self.allocated = self.operators = 0
        self.calls.clear()
        self.bytes.clear()

    def stop(self) -> None:
        """Stop counting; the figures stay."""
        self.counting = False

    def _see(self, tensor: Tensor) -> None:
        tensor = local_tensor(tensor)
        if known_device(tensor).type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        size = storage.nbytes()
        if key not in self.sizes:
            weakref.finalize(storage, self._gone, key)
            self.sizes[key] = 0
            self.allocated += size
        self._now(key, size)

    def _now(self, key: int, size: int) -> None:
        self.live += size - self.sizes[key]
        self.sizes[key] = size
        if self.counting:
            self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)

    def __enter__(self) -> Self:
        self._patches.enter_context(patched(self._resized, self._propagating))
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patches.close()

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (key := storage_key(storage)) in self.sizes:
            self._now(key, storage.nbytes())

    def _propagating(self, begins: bool) -> None:
        self.blind += 1 if begins else -1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is device_query:
            return known_device(args[0])
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # dispatched again with its local tensors
        kwargs = kwargs or {}
        out = shaped(func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        if self.blind:
            return out
        self.operators += 1
        if func.namespace == "c10d" and self.counting:
            self._collective(func, args)
        elif self.counting and (count := FLOPS.get(overloads(func))) is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return out

    def _collective(self, func: Any, args: tuple[Any, ...]) -> None:
        known = COLLECTIVES.get(operator_name(func))
        if known is None:
            return
        kind, index = known
        group = next((g for a in args if (g := _group_of(a)) is not None), None)
        axis = self.groups.get(group.group_name, "other") if group is not None else "other"
        self.calls[axis, kind] += 1
        size = sum(t.numel() * t.element_size() for t in tree_leaves(args[index]))
        self.bytes[axis, kind] += size
        if kind in self.copied:
            self.peak = max(self.peak, self.live + size)


def _group_of(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):
            return None
    return None


def _attention(
    products: float, where: Callable[[tuple[Any, ...]], tuple[Tensor, Tensor, bool]]
) -> Callable[..., float]:
    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> float:
        q, k, causal = where(args)
        batch, heads, rows, width = q.shape
        return products * batch * heads * rows * k.shape[-2] * width / (2 if causal or kwargs.get("is_causal") else 1)

    return count


def _causal(args: tuple[Any, ...], index: int) -> bool:
    return len(args) > index and bool(args[index])


FLOPS: dict[Any, Callable[..., float]] = {
    **flop_registry,
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    cpu_attention: _attention(4.0, lambda a: (a[0], a[1], _causal(a, 4))),
    cpu_attention_backward: _attention(8.0, lambda a: (a[1], a[2], _causal(a, 7))),
}
"""FLOPs by operator: torch's table and attention on CPUs, without scores recomputed in the backward pass."""
