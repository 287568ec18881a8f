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


def test_shapes_are_those_that_torch_finds() -> None:
    ops = torch.ops.aten
    with internals.fake_tensors() as mode, torch.no_grad():
        x, y = torch.empty(4, 1, 6), torch.empty(4, 6, dtype=torch.bfloat16)
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (ops.view.default, (x, [2, 12])), (ops.view.dtype, (y, torch.int16)), (ops._unsafe_view.default, (x, [24])),
            (ops.alias.default, (x,)), (ops.detach.default, (x,)), (ops.t.default, (y,)),
            (ops.transpose.int, (x, 0, 2)),
            (ops.permute.default, (x, [2, 0, 1])), (ops.as_strided.default, (x, [3, 2], [1, 4], 5)),
            (ops.slice.Tensor, (x, 0, 1, 3)), (ops.select.int, (x, 2, 3)), (ops.unsqueeze.default, (y, 1)),
            (ops.squeeze.dim, (x, 1)), (ops.expand.default, (x, [4, 5, 6])), (ops.clone.default, (y.t(),)),
            (ops.mm.default, (y, y.t())), (ops.bmm.default, (x, x.transpose(1, 2))),
        ]  # fmt: skip
        assert {func for func, _ in calls} == internals.SHAPED
        for func, args in calls:
            ours, theirs = internals.shaped(func, args, {}), func(*args)
            assert ours is not None
            for of in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset, internals.known_device):
                assert of(ours) == of(theirs), f"{func}: {MOVED}"
            keys = [internals.storage_key(t.untyped_storage()) for t in (args[0], ours, theirs)]
            assert ours.dtype == theirs.dtype and (keys[0] == keys[1]) == (keys[0] == keys[2]), f"{func}: {MOVED}"
            assert not internals.has_values(ours)
    with mode:
        elsewhere = torch.empty(6, 4, dtype=torch.bfloat16, device="meta")
    for func, args in ((ops.mm.default, (y, elsewhere)), (ops.add.Tensor, (x, x)), (ops.t.default, (ONE,))):
        assert internals.shaped(func, args, {}) is None
    assert internals.shaped(ops.clone.default, (x,), {"memory_format": torch.contiguous_format}) is None
