"""Every optimizer makes the same updates on a GPU as on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.job.optim import OPTIMIZERS
from weft.job.schema import Optim
from weft.optim.build_optimizers import build_optimizers

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (300, 64), "blocks.0.q": (64, 64), "blocks.0.up": (200, 64), "blocks.0.down": (64, 200),
    "blocks.1.q": (64, 64), "blocks.1.k": (24, 64), "blocks.1.experts.up": (4, 96, 64), "blocks.1.norm": (64,),
    "head": (77, 64),
}  # fmt: skip


def updates(optim: Optim, device: str, steps: int) -> dict[str, Tensor]:
    """The weights after some steps with random gradients."""
    random = torch.Generator().manual_seed(0)
    weights = {
        name: nn.Parameter(torch.randn(shape, generator=random).to(device) / 8) for name, shape in SHAPES.items()
    }
    optimizers = build_optimizers(optim, weights, lambda name: name.startswith("blocks."))
    for _ in range(steps):
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=random).to(device)
        for part in optimizers.parts:
            part.step()
    return {name: weight.detach().cpu() for name, weight in weights.items()}


@pytest.mark.parametrize("name", [entry.name for entry in OPTIMIZERS])
def test_updates_equal_those_of_a_cpu(name: str) -> None:
    optim = Optim(name=name, lr=1e-2, weight_decay=0.1)
    before, right, found = updates(optim, "cpu", 0), updates(optim, "cpu", 4), updates(optim, "cuda", 4)
    for key, exact in right.items():
        moved = float((exact - before[key]).norm())
        assert moved > 0
        assert float((found[key] - exact).norm()) < 1e-3 * moved, key
