"""The private torch operations on lists of tensors still do what weft/comm/foreach_internals.py says."""

from __future__ import annotations

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
