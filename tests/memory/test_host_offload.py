"""Offloaded tensors return unchanged, within the memory limit, and buffers are reused."""

from __future__ import annotations

import torch

from weft.memory import HostOffload

CPU = torch.device("cpu")


def test_tensors_return_unchanged_and_buffers_are_reused() -> None:
    offload = HostOffload(CPU, 3 * 1024 * 4 / 2**30)  # three tensors of 1024 floats
    for step in range(3):
        made = [torch.full((32, 32), float(10 * step + i)) for i in range(5)]
        entries = [offload.put([t]) for t in made]
        assert [bool(e.there) for e in entries] == [True] * 3 + [False] * 2  # the others stay where they are
        assert all(not e.here for e in entries[:3])
        for made_one, entry in reversed(list(zip(made, entries, strict=True))):
            (back,) = offload.get(entry)
            assert torch.equal(back, made_one)
            assert (back is made_one) == (entry in entries[3:])
        assert offload.last is None
        assert sum(len(rooms) for rooms in offload.room.values()) == 3


def test_views_and_other_dtypes() -> None:
    offload = HostOffload(CPU, 1.0)
    turned = torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4).transpose(1, 2)
    entry = offload.put([turned, torch.tensor([1.0, float("-inf")])])
    back, log = offload.get(entry)
    assert torch.equal(back, turned) and back.dtype == torch.bfloat16
    assert log.tolist() == [1.0, float("-inf")]
