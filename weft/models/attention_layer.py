"""The attention part of a block: queries, keys and values, the core, and the output layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from weft.job.schema import Model
from weft.models.attention import TokenInfo, attention
from weft.models.attention_sinks import AttentionSinks, attention_with_sinks
from weft.models.norms import WideRMSNorm, make_qk_norm
from weft.models.rope import rotate

AttentionFunction = Callable[[Tensor, Tensor, Tensor, bool, TokenInfo], Tensor]
"""Attention of queries, keys and values [batch, seq, heads, head_dim], causal or not."""


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, info: TokenInfo) -> Tensor:
    return (attention if info.sinks is None else attention_with_sinks)(q, k, v, causal, info)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _only_new(*new: Tensor) -> tuple[Tensor, ...]:
    return new


class Attention(nn.Module):
    """Grouped-query attention. The number of heads follows from the width of q, k and v, so any share of them works.

    Parallel layouts replace `enter` (gathers the input), `whole_head` (gathers a key or value head of which each rank
    computes a part) and `core` (the attention itself). A cache of earlier tokens replaces `store`, which returns what
    it is given with that of earlier tokens before it, and `core`.
    """

    core: AttentionFunction = staticmethod(_attention)
    enter: Callable[[Tensor], Tensor] = staticmethod(_unchanged)
    whole_head: Callable[[Tensor], Tensor] = staticmethod(_unchanged)
    store: Callable[..., tuple[Tensor, ...]] = staticmethod(_only_new)

    def __init__(self, m: Model, index: int = 0):
        super().__init__()
        assert m.dim and m.heads and m.kv_heads and m.head_dim
        self.set_options(m, index)
        bias, out_bias, _ = m.biases
        self.q = nn.Linear(m.dim, m.heads * m.head_dim, bias=bias)
        self.k = nn.Linear(m.dim, m.kv_heads * m.head_dim, bias=bias)
        self.v = nn.Linear(m.dim, m.kv_heads * m.head_dim, bias=bias)
        self.o = nn.Linear(m.heads * m.head_dim, m.dim, bias=out_bias)
        self.sinks = AttentionSinks(m.heads) if m.sinks else None
        self.q_norm, self.k_norm = make_qk_norm(m, m.heads), make_qk_norm(m, m.kv_heads)

    def set_options(self, m: Model, index: int) -> None:
        """What does not depend on how queries, keys and values are made."""
        assert m.head_dim
        self.head_dim, self.causal = m.head_dim, bool(m.causal)
        self.window = m.window if m.has_window(index) else None
        self.window_theta = self.window is not None and m.window_theta is not None
        self.q_scale = 1.0 if m.attention_scale is None else m.attention_scale * m.head_dim**0.5

    def project(self, x: Tensor, info: TokenInfo) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values with rotary positions applied."""
        x = self.enter(x)
        q, k = self._normed(self.q_norm, self.q(x)), self._normed(self.k_norm, self.k(x), self.whole_head)
        v = self.whole_head(self.v(x)).unflatten(-1, (-1, self.head_dim))
        angles = info.window_rotation if self.window_theta else info.rotation
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        k, v = self.store(k, v)
        return q if self.q_scale == 1.0 else q * self.q_scale, k, v

    def _normed(self, norm: nn.Module | None, x: Tensor, whole: Callable[[Tensor], Tensor] = _unchanged) -> Tensor:
        """x [batch, seq, width] by heads, normalised."""
        if isinstance(norm, WideRMSNorm):
            return whole(norm(x)).unflatten(-1, (-1, self.head_dim))
        x = whole(x).unflatten(-1, (-1, self.head_dim))
        return x if norm is None else norm(x)

    def forward(self, x: Tensor, info: TokenInfo) -> Tensor:
        q, k, v = self.project(x, info)
        return self.output(self.core(q, k, v, self.causal, self.limited(info)))

    def limited(self, info: TokenInfo) -> TokenInfo:
        """With this layer's window and sinks."""
        if self.window is not None:
            info = info._replace(window=self.window)
        return info if self.sinks is None else info._replace(sinks=self.sinks())

    def output(self, y: Tensor) -> Tensor:
        """The output layer, from the output of the core [batch, seq, heads, head_dim]."""
        return self.o(y.flatten(2))
