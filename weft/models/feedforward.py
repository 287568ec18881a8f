"""The dense feed-forward part of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model
from weft.models.attention import TokenInfo


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "gelu": _gelu, "gelu_exact": F.gelu, "quick_gelu": _quick_gelu, "relu": F.relu, "silu": F.silu,
    "swiglu": F.silu, "geglu": _gelu,
}  # fmt: skip
"""The function of each model.activation; gated ones apply it to the gate."""


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate · sigmoid(alpha · gate) of a gate up to `limit` (gpt-oss); the other factor is within ± limit, plus 1."""

    limit: float
    alpha: float

    def __call__(self, gate: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        return gate * (gate * self.alpha).sigmoid()


def make_activation(m: Model) -> Activation:
    """The function of a model's activation."""
    assert m.activation
    if m.activation == "swiglu_clamped":
        return ClampedSwiGLU(m.swiglu_limit or 7.0, m.swiglu_alpha or 1.702)
    return ACTIVATIONS[m.activation]


def gated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """The product of the two layers of a gated feed-forward part."""
    if isinstance(activation, ClampedSwiGLU):
        up = up.clamp(-activation.limit, activation.limit) + 1
    return activation(gate) * up


class FeedForward(nn.Module):
    """Two linears around an activation, or three of which one is gated by another."""

    def __init__(self, m: Model):
        super().__init__()
        assert m.dim and m.ffn
        bias = m.biases[2]
        self.activation = make_activation(m)
        self.gate = nn.Linear(m.dim, m.ffn, bias=bias) if m.gated else None
        self.up = nn.Linear(m.dim, m.ffn, bias=bias)
        self.down = nn.Linear(m.ffn, m.dim, bias=bias)

    def forward(self, x: Tensor, info: TokenInfo) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(gated(self.activation, self.gate(x), self.up(x)))
