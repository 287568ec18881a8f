"""The private names of torch that dry runs use still exist and do what they did."""

from __future__ import annotations

import torch
from torch import nn

from weft.memory.tensor_tracer_internals import fake_tensors
from weft.verify.dryrun_internals import fused_norms, storage_bytes


def test_fake_tensors_have_no_data() -> None:
    with fake_tensors():
        assert torch.ones(1 << 40).shape == (1 << 40,), "torch moved FakeTensorMode"


def test_a_storage_is_counted_once() -> None:
    x = torch.zeros(8)
    assert storage_bytes([x, x[2:], torch.zeros(2)]) == 4 * 10, "torch moved the identity of a storage, _cdata"


def test_norms_save_what_a_gpu_saves_and_are_put_back() -> None:
    norm, x = nn.RMSNorm(4), torch.ones(2, 4, requires_grad=True)
    saved: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with fused_norms(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        norm(x).sum().backward()
    assert sorted(saved) == [(2, 1), (2, 4), (4,)], "nn.RMSNorm no longer calls the forward of its class"
    assert torch.allclose(norm(x), torch.ones(2, 4))
