"""The private names of FSDP2 that weft/parallel/data/fsdp_internals.py uses still exist and do what they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weft.comm.fake_internals import join_fake_group
from weft.comm.meter import Meter
from weft.comm.teardown import leave
from weft.parallel.data import fsdp_internals

MOVED = "FSDP2 moved a private name that weft/parallel/data/fsdp_internals.py uses: {}"


@pytest.fixture
def unit() -> Any:
    """A root with one FSDP2 module below it, on rank 0 of two ranks that do not exist."""
    join_fake_group(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    fully_shard(module[0], mesh=mesh)
    fully_shard(module, mesh=mesh)
    module(torch.ones(2, 4))  # FSDP2 finds its modules in the first forward pass
    yield module
    leave()


def test_private_names_of_fsdp2(unit: Any) -> None:
    try:
        states = fsdp_internals.fsdp_states(unit)
        assert len(states) == 2 and all(len(fsdp_internals.fsdp_groups(s)) == 1 for s in states)
        [(group, params)] = fsdp_internals.sharded_params(unit[0])
        assert dist.get_world_size(group) == 2
        assert [(tuple(p.shape), p.dim) for p in params] == [((6, 4), 0), ((6,), 0)]
        assert params[0].param is unit[0].weight or tuple(params[0].param.shape) == (6, 4)
        assert fsdp_internals.all_reduces(unit)()
        unit.set_requires_all_reduce(False)
        assert not fsdp_internals.all_reduces(unit)()
    except (AttributeError, TypeError) as error:
        pytest.fail(MOVED.format(error))


def test_gradients_without_hooks(unit: Any) -> None:
    unit.set_requires_gradient_sync(False)
    unit(torch.ones(2, 4)).sum().backward()
    unit.set_is_last_backward(True)
    unit.set_requires_gradient_sync(True)
    try:
        fsdp_internals.accumulate_gradients(unit)
        fsdp_internals.reduce_now(unit)
    except (AttributeError, TypeError) as error:
        pytest.fail(MOVED.format(error))
    assert all(p.grad is not None for p in unit.parameters())


def test_waits_on_a_gpu_are_counted(unit: Any) -> None:
    meter = Meter()
    try:
        for module in (unit, unit[0]):
            fsdp_internals.meter_gpu_waits(module, meter, "dp_shard")
    except AttributeError as error:
        pytest.fail(MOVED.format(error))
    unit(torch.ones(2, 4)).sum().backward()
    assert meter.waited.keys() == {"dp_shard"} and meter.number >= 4
