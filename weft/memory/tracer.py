"""Counts what a piece of work does: live bytes of tensors and their peak, FLOPs, and every collective with its bytes.

It counts tensors, not pages: what the kernels and the process need besides is not in it. Fake tensors count as real.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

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
"""What torch calls a collective, what we call it, and which of its arguments is the whole tensor."""


class Tracer(TorchDispatchMode):
    """Counts what happens inside it. `groups` names process groups; those it does not name are `other`. `copied` are
    the collectives whose tensors a backend that does not exist here would copy first."""

    def __init__(self, groups: dict[str, str] | None = None, copied: frozenset[str] = frozenset()):
        super().__init__()
        self.groups, self.copied = groups or {}, copied
        self.live = self.peak = 0
        self.counting = True
        self.flops = 0.0
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.sizes: dict[int, int] = {}
        self.blind = False
        self._resize = torch.UntypedStorage.resize_
        self._propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that existed before."""
        for tensor in tensors:
            self._see(tensor)

    def start(self) -> None:
        """Forget what was counted so far; what is alive stays counted."""
        self.peak, self.flops, self.counting = self.live, 0.0, True
        self.calls.clear()
        self.bytes.clear()

    def stop(self) -> None:
        """Count no more; the figures stay."""
        self.counting = False

    def _see(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key not in self.sizes:
            weakref.finalize(storage, self._gone, key)
            self.sizes[key] = 0
        self._now(key, size)

    def _now(self, key: int, size: int) -> None:
        self.live += size - self.sizes[key]
        self.sizes[key] = size
        if self.counting:
            self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)

    def __enter__(self) -> Self:
        original = self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            """FSDP2 frees gathered weights so, past every dispatcher."""
            out = original(storage, size)
            if storage._cdata in self.sizes:
                self._now(storage._cdata, storage.nbytes())
            return out

        propagate = self._propagate

        def unseen(*args: Any, **kwargs: Any) -> Any:
            """DTensor tries an operator on whole tensors without data before it runs it on shards: none is real."""
            before, self.blind = self.blind, True
            try:
                return propagate(*args, **kwargs)
            finally:
                self.blind = before

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment,method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = unseen  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = self._propagate  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes again as what its local tensors do
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.blind:
            return out
        if func.namespace == "c10d" and self.counting:
            self._collective(func, args)
        elif self.counting and (count := FLOPS.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return out

    def _collective(self, func: Any, args: tuple[Any, ...]) -> None:
        known = COLLECTIVES.get(func._schema.name.partition("::")[2])
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
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention(4.0, lambda a: (a[0], a[1], _causal(a, 4))),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(
        8.0, lambda a: (a[1], a[2], _causal(a, 7))
    ),
}
"""FLOPs of an operator. Attention on a CPU is torch's gap; scores made again on the way back are not counted."""
