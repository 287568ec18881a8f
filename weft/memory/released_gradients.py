"""Gradients that exist for one unit at a time: the backward pass completes them, and the unit is updated at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from weft.comm.foreach_internals import sums_of_squares


class ReleasedGradients:
    """The weights whose gradients are consumed in the backward pass. Their sums of squares are kept."""

    def __init__(self, weights: dict[str, nn.Parameter]):
        self.weights = weights
        self.squares: dict[str, Tensor] = {}
        """Of the last step, by weight."""
        self.seen: set[str] = set()
        """Weights that got a gradient in this step."""
        self.ready: Callable[[str], None] = lambda name: None
        """Called with the name of a weight whose gradient is complete."""
        for name, weight in weights.items():
            weight.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))

    def __contains__(self, name: str) -> bool:
        return name in self.weights

    def begin(self) -> None:
        """Begin a step."""
        self.seen.clear()

    def take(self, name: str) -> None:
        """Keep the sum of squares of a gradient that autograd has just computed, and hand the gradient over."""
        grad = self.weights[name].grad
        assert grad is not None and name not in self.seen
        self.seen.add(name)
        with torch.no_grad():
            self.squares[name] = sums_of_squares([grad])[0]
            self.ready(name)

    def finish(self) -> None:
        """After the backward pass: a weight that was not used has a gradient of zeros."""
        for name, weight in self.weights.items():
            if name not in self.seen:
                weight.grad = torch.zeros_like(weight)
                self.take(name)


def _hook(owner: weakref.ref[ReleasedGradients], name: str) -> Callable[[Tensor], None]:
    """A hook with a weak reference to its owner, which autograd's hooks would keep alive otherwise."""

    def gradient_ready(weight: Tensor) -> None:
        if (gradients := owner()) is not None:
            gradients.take(name)

    return gradient_ready
