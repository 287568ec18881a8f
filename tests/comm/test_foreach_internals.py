"""The private torch operations on lists of tensors still do what weft/comm/foreach_internals.py says."""

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
    assert internals.foreach_norm(some).tolist() == [torch.full((2,), 2.0).norm(), torch.full((3,), 3.0).norm()], moved
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
