"""torch's private names for DTensor and DeviceMesh: offsets of shards, joined meshes, and caches that keep meshes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's shard, and the index in the whole tensor at which it begins."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dimensions of several parts of a mesh, some of which may be flattened."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(list(meshes))


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The ranks of all dimensions of a mesh as one dimension."""
    return mesh._flatten(name)


def forget_meshes(known: Sequence[Any]) -> None:
    """Clear DTensor's caches: they keep meshes alive, and take a new one of the same shape for an old one. `known` are
    caches found before; the garbage collector finds those made since."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # since torch 2.12
        _redistribute.clear_redistribute_planner_cache()
    for cache in [*known, *dtensor_caches()]:
        cache.cache_clear()


def dtensor_caches() -> list[Any]:
    """The functools caches of torch.distributed.tensor. torch has no list of them and makes some at run time, so they
    are searched among the objects that the garbage collector tracks; frozen ones (gc.freeze) are not found."""
    cache = functools._lru_cache_wrapper
    found = [x for x in gc.get_referrers(cache) if type(x) is cache]  # its instances refer to it
    return [x for x in found if str(getattr(x, "__module__", "")).startswith("torch.distributed.tensor")]


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard, the tensor object itself and not a view of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
