"""torch's random operators still do what weft/verify/random_operators_internals.py says."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.verify.random_operators_internals import MeanDraws, RandomStates


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> list[Tensor]:
        normal = torch.distributions.Normal(x, 2.0).rsample()
        attended = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        first = [self.drop(x), torch.randn_like(x), torch.rand(3), torch.bernoulli(x / 10), normal, attended]
        return [*first, torch.empty(3).uniform_(2, 4), torch.randint(0, 7, (2,)), torch.randn(3)]


def test_random_numbers_become_their_means() -> None:
    x, moved = torch.full((1, 2, 4), 3.0, requires_grad=True), "torch changed a random operator"
    module = Draws()
    mode = MeanDraws(module)
    for _ in range(2):
        with mode:
            out = module(x)
            sum(o.sum() for o in out if o.requires_grad).backward()
    means = (3.0, 0.0, 0.5, 0.3, 3.0, 3.0, 3.0, 3.0, 0.0)
    for tensor, mean in zip(out, means, strict=True):
        torch.testing.assert_close(tensor.double(), torch.full_like(tensor, mean, dtype=torch.double), msg=moved)
    assert "bernoulli_ in drop (Dropout)" in mode.operators, moved
    assert all(name.endswith((" in Draws", " in drop (Dropout)")) for name in mode.operators) and not mode.kept, moved
    with mode:
        torch.randperm(3)
    assert list(mode.kept) == ["randperm"], moved
    assert not module._forward_hooks


def test_generators_that_were_used_are_known() -> None:
    states = RandomStates(torch.device("cpu"))
    with states:
        torch.ones(2).sum()
    assert not states.changed
    with states:
        torch.rand(1), random.random()
    assert set(states.changed) == {"torch", "random"}
