"""A backward pass in two halves gives the gradients of a whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from weft.models.fp8.fp8_linear import Fp8Recipe, fp8_linear
from weft.parallel.pipeline.split_backward import backward_input, backward_weights


class _Product(torch.autograd.Function):
    """Computes the gradients of its input and its weight together, as fp8 products and compiled blocks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] @ w, grads[0].t() @ x


class Stage(nn.Module):
    """Plain layers, a custom function, fp8, a weight used twice, one used by no one and a frozen one."""

    def __init__(self, embeds: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16) if embeds else None
        self.plain, self.twice, self.unused = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(2, 2)
        self.norm = nn.LayerNorm(16)
        self.custom, self.low, self.frozen = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        x = x + self.twice(F.gelu(self.plain(x)))
        x = x + _Product.apply(self.norm(x), self.custom.weight)
        x = x + fp8_linear(x, self.low.weight, None, Fp8Recipe()).float()
        y: Tensor = self.frozen(self.twice(x))
        return y


@pytest.mark.parametrize("embeds", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
def test_both_halves_are_the_whole(embeds: bool, is_last: bool) -> None:
    torch.manual_seed(0)
    stage = Stage(embeds)
    given = torch.randint(8, (32,)) if embeds else torch.randn(32, 16)
    expected: dict[str, Tensor] = {}
    for split in (False, True):
        stage.zero_grad()
        for microbatch in range(2):
            hidden = None if embeds else (given + microbatch).requires_grad_()
            out = stage(given if hidden is None else hidden)
            out, grad = (out.square().mean(), None) if is_last else (out, torch.ones_like(out))
            if not split:
                torch.autograd.backward(out, grad)
                expected["hidden"] = torch.zeros(()) if hidden is None or hidden.grad is None else hidden.grad
                continue
            inputs = [] if hidden is None else [hidden]
            found, parts = backward_input([out], [grad], inputs, stage.parameters())
            assert (found == []) == embeds
            assert not found or torch.equal(found[0], expected["hidden"]) or microbatch == 0
            # torch 2.11 cannot start a backward pass at the node of a custom function
            assert parts and not any(isinstance(part.node, BackwardCFunction) for part in parts)
            backward_weights(parts)
            assert not parts
        if not split:
            expected |= {n: p.grad.clone() for n, p in stage.named_parameters() if p.grad is not None}
    for name, p in stage.named_parameters():
        assert (p.grad is None) == (name not in expected), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_plain_layers_are_left_for_later() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    hidden = torch.randn(3, 4, requires_grad=True)
    _, parts = backward_input([stage(hidden).sum()], [None], [hidden], stage.parameters())
    assert all(p.grad is None for p in stage.parameters())
    assert {id(w) for part in parts for w in part.weights} == {id(p) for p in stage.parameters()}


def test_several_outputs() -> None:
    """A weight with an output of its own gets its gradient at once, complete."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x, hidden = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
    given: list[Tensor | None] = [torch.randn(3, 4), torch.randn(3, 4)]

    def outputs() -> list[Tensor]:
        inner = first(x)
        return [inner, second(hidden + inner)]

    torch.autograd.backward(outputs(), given)
    weights = [*first.parameters(), *second.parameters()]
    expected = [w.grad for w in (*weights, hidden)]
    for w in weights:
        w.grad = None
    found, parts = backward_input(outputs(), given, [hidden], weights)
    backward_weights(parts)
    for a, b in zip(expected, [*(w.grad for w in weights), *found], strict=True):
        assert a is not None and b is not None
        assert torch.allclose(a, b)
