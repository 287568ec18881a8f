"""torch's private names for tensors without data and for peers that do not exist, which dry runs use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from weft.comm import dtensor_internals


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no data."""
    return isinstance(tensor, FakeTensor)


def join_fake_group(rank: int, world: int) -> None:
    """Make the default process group one whose peers do not exist: nothing is sent or received."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


@contextmanager
def real_meshes() -> Iterator[None]:
    """Look up ranks and shards in real tensors while all other tensors are fake."""

    def real(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def outside(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return outside

    patched: list[tuple[Any, str, Any]] = [
        (DeviceMesh, "__getitem__", DeviceMesh.__getitem__),
        (DeviceMesh, "_concatenate", staticmethod(DeviceMesh._concatenate)),
        (dtensor_internals, OFFSETS, getattr(dtensor_internals, OFFSETS)),
    ]
    for owner, name, was in patched:
        now = real(was.__func__ if isinstance(was, staticmethod) else was)
        setattr(owner, name, staticmethod(now) if isinstance(was, staticmethod) else now)
    try:
        yield
    finally:
        for owner, name, was in patched:
            setattr(owner, name, was)


OFFSETS = "compute_local_shape_and_global_offset"
