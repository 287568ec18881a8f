"""The dense feed-forward part of a block."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model
from weft.models.attention import TokenInfo


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu, "gelu_exact": F.gelu, "relu": F.relu, "swiglu": F.silu, "geglu": _gelu,
}  # fmt: skip
"""The function of each model.activation; gated ones apply it to the gate."""


class FeedForward(nn.Module):
    """Two linears around an activation, or three of which one is gated by another."""

    def __init__(self, m: Model):
        super().__init__()
        assert m.dim and m.ffn and m.activation
        bias = m.biases[2]
        self.activation = ACTIVATIONS[m.activation]
        self.gate = nn.Linear(m.dim, m.ffn, bias=bias) if m.gated else None
        self.up = nn.Linear(m.dim, m.ffn, bias=bias)
        self.down = nn.Linear(m.ffn, m.dim, bias=bias)

    def forward(self, x: Tensor, info: TokenInfo) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))
