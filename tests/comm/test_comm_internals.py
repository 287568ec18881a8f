"""The private names of torch that weft.comm uses still exist and do what they did."""

from __future__ import annotations

import functools
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from weft.comm import dtensor_internals, fake_internals, point_to_point_internals
from weft.comm.teardown import leave

MOVED = "torch moved a private name that weft/comm/{} uses: {}"


@pytest.fixture
def fake_ranks() -> Any:
    """Rank 1 of four ranks that do not exist."""
    try:
        fake_internals.join_fake_group(1, 4)
    except (ImportError, TypeError) as error:
        pytest.fail(MOVED.format("fake_internals.py", error))
    yield
    leave()


def test_fake_tensors() -> None:
    with FakeTensorMode():
        assert fake_internals.is_fake(torch.ones(2)), MOVED.format("fake_internals.py", "FakeTensor")
    assert not fake_internals.is_fake(torch.ones(2))


def test_shards_and_meshes(fake_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = distribute_tensor(torch.arange(10.0).view(5, 2), mesh["b"], [Shard(0)], src_data_rank=None)
    try:
        assert dtensor_internals.local_shape_and_offset(whole) == ((2, 2), (3, 0))
        assert dtensor_internals.local_tensor(whole).shape == (2, 2)
        flat = dtensor_internals.flatten_mesh(mesh, "ab")
        joined = dtensor_internals.join_meshes([mesh["a"], mesh["b"]])
        with FakeTensorMode(), fake_internals.real_meshes():
            assert dtensor_internals.local_shape_and_offset(whole) == ((2, 2), (3, 0))
    except (AttributeError, TypeError) as error:
        pytest.fail(MOVED.format("dtensor_internals.py", error))
    assert flat.size() == 4 and joined.mesh_dim_names == ("a", "b")


def test_caches_of_dtensor_are_found_and_cleared(fake_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    whole = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)], src_data_rank=None)
    (whole + whole).redistribute(mesh, [Shard(1)])
    gc.unfreeze()  # the tests' own imports may be frozen
    caches = dtensor_internals.dtensor_caches()
    assert caches and all(isinstance(c, functools._lru_cache_wrapper) for c in caches), MOVED.format(
        "dtensor_internals.py", "no functools cache of torch.distributed.tensor was found"
    )
    try:
        dtensor_internals.forget_meshes(caches)
    except (ImportError, AttributeError) as error:
        pytest.fail(MOVED.format("dtensor_internals.py", error))
    assert all(c.cache_info().currsize == 0 for c in caches)


def test_leave_without_groups() -> None:
    leave()
    assert not dist.is_initialized()


def test_groups_of_a_failed_batch_are_closed() -> None:
    names = [(dist.ProcessGroup, "_get_backend")]
    names += [(dist.ProcessGroupNCCL, "_group_end")] if dist.is_nccl_available() else []
    missing = [name for owner, name in names if not hasattr(owner, name)]
    assert not missing, MOVED.format("point_to_point_internals.py", missing)

    class Backend:
        open = 2

        def _group_end(self) -> None:
            if not self.open:
                raise RuntimeError("no group is open")
            self.open -= 1

    class Group:
        backend = Backend()

        def _get_backend(self, device: torch.device) -> Backend:
            return self.backend

    failing = SimpleNamespace(group=Group(), tensor=torch.ones(1))  # torch refuses it: it is no P2POp
    with pytest.raises(Exception, match="P2POp"):
        point_to_point_internals.batch_isend_irecv([failing])  # type: ignore[list-item]
    assert failing.group.backend.open == 0
