"""The private torch names of weft/memory/tensor_tracer_internals.py still exist and behave as the tracer needs."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from weft.memory import tensor_tracer_internals as internals

ONE = torch.ones(1)
MOVED = "adapt weft/memory/tensor_tracer_internals.py"


def test_resizes_are_reported_and_the_patch_is_undone() -> None:
    before = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached
    storage, seen = torch.ones(4).untyped_storage(), []
    with internals.patched(lambda s: seen.append(internals.storage_key(s)), lambda begins: None):
        storage.resize_(0)
    assert seen == [internals.storage_key(storage)], f"torch resizes storages another way: {MOVED}"
    assert before == (torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached)


def test_operators_are_named() -> None:
    names: list[str] = []

    class Names(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(internals.operator_name(func))
            assert internals.overloads(func) is torch.ops.aten.add
            return func(*args, **(kwargs or {}))

    with Names():
        torch.add(ONE, 1)
    assert names == ["add"], f"torch names operators another way: {MOVED}"
