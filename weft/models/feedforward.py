"""The dense feed-forward part of a block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model
from weft.models.attention import TokenInfo


class FeedForward(nn.Module):
    """Two linears around a GELU, or three around a SwiGLU."""

    def __init__(self, m: Model):
        super().__init__()
        assert m.dim and m.ffn
        self.gate = nn.Linear(m.dim, m.ffn, bias=bool(m.bias)) if m.activation == "swiglu" else None
        self.up = nn.Linear(m.dim, m.ffn, bias=bool(m.bias))
        self.down = nn.Linear(m.ffn, m.dim, bias=bool(m.bias))

    def forward(self, x: Tensor, info: TokenInfo) -> Tensor:
        hidden = F.gelu(self.up(x), approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(hidden)
