"""The private torch operations on lists of tensors still do what weft/comm/foreach_internals.py says, and sums of
squares are right whatever the size of a tensor."""

from __future__ import annotations

import pytest
import torch

from weft.comm import foreach_internals as internals


def test_operations_on_lists() -> None:
    some = [torch.ones(2), torch.full((3,), 2.0)]
    internals.foreach_add_(some, torch.tensor(1.0))
    internals.foreach_mul_(some, torch.tensor(2.0))
    moved = "torch changed a _foreach operation: adapt weft/comm/foreach_internals.py"
    assert [t[0].item() for t in some] == [4.0, 6.0], moved
    internals.foreach_lerp_(some, [torch.zeros(2), torch.zeros(3)], 0.5)
    assert [t[0].item() for t in some] == [2.0, 3.0], moved
    assert internals.sums_of_squares(some).tolist() == [pytest.approx(8.0), pytest.approx(27.0)], moved
    copies = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)]
    internals.foreach_copy_(copies, some)
    assert [t[0].item() for t in copies] == [2.0, 3.0], moved
    internals.foreach_mul_(some, [2.0, 3.0])
    internals.foreach_mul_(some, [torch.tensor(0.5), torch.tensor(1 / 3)])
    internals.foreach_lerp_(some, [torch.zeros(2), torch.zeros(3)], [torch.tensor(0.5), torch.tensor(1 / 3)])
    internals.foreach_add_scaled_(some, some, 1.0)
    assert [t[0].item() for t in some] == [2.0, 4.0], moved
    assert [t[0].item() for t in internals.foreach_lerp(some, [c.float() for c in copies], 0.5)] == [2.0, 3.5], moved
    assert [t[0].item() for t in internals.foreach_mul(some, torch.tensor(0.5))] == [1.0, 2.0], moved
    assert internals.foreach_mul([torch.ones(2, 1)], [torch.ones(1, 3)])[0].shape == (2, 3), moved
    assert [t[0].item() for t in internals.foreach_add_scaled(some, some, 2.0)] == [6.0, 12.0], moved
    internals.foreach_add_squares_(some, some, 0.5)
    internals.foreach_clamp_max_(some, 9.0)
    assert [t[0].item() for t in some] == [4.0, 9.0], moved
    assert [t[0].item() for t in internals.foreach_sqrt(some)] == [2.0, 3.0], moved
    assert internals.foreach_rsqrt(some)[0][0].item() == 0.5, moved
    internals.foreach_reciprocal_(some, 1.0)
    assert [t[0].item() for t in some] == [pytest.approx(0.2), pytest.approx(0.1)], moved


def test_sums_of_squares_are_those_in_fp64_whatever_the_size() -> None:
    """torch's norm of the first tensor is 0.4 % too small."""
    part = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    tensors = [part, torch.full((1_000_003,), 0.7), part.bfloat16(), *(part[:n] for n in (0, 1, 255, 1025, 4096))]
    exact = torch.stack([t.double().square().sum() for t in tensors])
    torch.testing.assert_close(internals.sums_of_squares(tensors), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(internals.sums_of_squares([part.repeat(50)]), 50 * exact[:1], rtol=1e-6, atol=0)


def test_sums_of_squares_of_any_strides() -> None:
    x = torch.randn(6, 130, 260, generator=torch.Generator().manual_seed(0))
    strided = [x, x.mT, x.permute(2, 0, 1), x[:, 1:, ::2], x[0, 0].expand(300, 260), x.double()]
    exact = torch.stack([t.double().square().sum() for t in strided])
    torch.testing.assert_close(internals.sums_of_squares(strided), exact, rtol=1e-6, atol=0)


def test_sums_of_squares_along_a_dim() -> None:
    x = torch.rand(2, 100_003, 3, generator=torch.Generator().manual_seed(0))
    for tensor, dim in ((x, -2), (x.mT, -1), (x, -1), (x.mT.contiguous(), -1)):
        exact = tensor.double().square().sum(dim, keepdim=True)
        torch.testing.assert_close(internals.sums_of_squares_along(tensor, dim).double(), exact, rtol=5e-7, atol=0)
