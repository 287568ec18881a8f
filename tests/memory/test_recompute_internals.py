"""The private torch name of weft/memory/recompute_internals.py exists and does what it did."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from weft.memory.recompute import selective_policy
from weft.memory.recompute_internals import selective_contexts


def test_private_name_exists() -> None:
    assert hasattr(torch_checkpoint, "_CachedTorchDispatchMode"), (
        "torch moved _CachedTorchDispatchMode: change weft/memory/recompute_internals.py"
    )


def test_recompute_may_run_other_operators() -> None:
    """As FSDP's hooks do; the product is not computed again."""
    passes: list[int] = []

    def block(x: Tensor) -> Tensor:
        passes.append(1)
        for _ in passes:
            torch.zeros(1).cos()
        return (x @ x).sin()

    x = torch.randn(4, 4, requires_grad=True)
    contexts = partial(selective_contexts, selective_policy)
    torch_checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert len(passes) == 2 and x.grad is not None
    y = x.detach().requires_grad_()
    (y @ y).sin().sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
