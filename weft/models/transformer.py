"""One transformer that covers GPT-2, Llama and ViT by configuration, without any parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model
from weft.job.shapes import PATCH_DIM
from weft.models.attention import TokenInfo, attention
from weft.models.dropout import Dropout, salt
from weft.models.feedforward import FeedForward
from weft.models.loss import HeadProducts, HeadProductsFactory, linear_cross_entropy
from weft.models.mixture_of_experts import MixtureOfExperts
from weft.models.rope import frequencies, rotate, rotation

AttentionFunction = Callable[[Tensor, Tensor, Tensor, bool, TokenInfo], Tensor]
"""Attention of queries, keys and values [batch, seq, heads, head_dim], causal or not."""


def _unchanged(x: Tensor) -> Tensor:
    return x


class Attention(nn.Module):
    """Grouped-query attention. The number of heads follows from the width of q, k and v, so any share of them works.

    Parallel layouts replace `enter` (gathers the input) and `core` (the attention itself).
    """

    core: AttentionFunction = staticmethod(attention)
    enter: Callable[[Tensor], Tensor] = staticmethod(_unchanged)

    def __init__(self, m: Model):
        super().__init__()
        assert m.dim and m.heads and m.kv_heads and m.head_dim
        self.head_dim, self.causal, bias = m.head_dim, bool(m.causal), bool(m.bias)
        self.q = nn.Linear(m.dim, m.heads * m.head_dim, bias=bias)
        self.k = nn.Linear(m.dim, m.kv_heads * m.head_dim, bias=bias)
        self.v = nn.Linear(m.dim, m.kv_heads * m.head_dim, bias=bias)
        self.o = nn.Linear(m.heads * m.head_dim, m.dim, bias=bias)
        self.q_norm = _norm(m, m.head_dim) if m.qk_norm else None
        self.k_norm = _norm(m, m.head_dim) if m.qk_norm else None

    def project(self, x: Tensor, info: TokenInfo) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values with rotary positions applied."""
        x = self.enter(x)
        batch, seq, _ = x.shape
        q = self.q(x).view(batch, seq, -1, self.head_dim)
        k = self.k(x).view(batch, seq, -1, self.head_dim)
        v = self.v(x).view(batch, seq, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if info.rotation is not None:
            q, k = rotate(q, info.rotation), rotate(k, info.rotation)
        return q, k, v

    def forward(self, x: Tensor, info: TokenInfo) -> Tensor:
        y = self.core(*self.project(x, info), self.causal, info)
        return self.o(y.flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, m: Model, index: int):
        super().__init__()
        assert m.dim
        self.attn_norm = _norm(m, m.dim)
        self.attn = Attention(m)
        self.attn_drop = Dropout(m.dropout or 0.0, site=1)
        self.mlp_norm = _norm(m, m.dim)
        routed = m.experts is not None and index >= m.experts.first_dense
        self.mlp = MixtureOfExperts(m) if routed else FeedForward(m)
        self.mlp_drop = Dropout(m.dropout or 0.0, site=2)

    def forward(self, x: Tensor, info: TokenInfo) -> Tensor:
        x = x + self.attn_drop(self.attn(self.attn_norm(x), info), info.keys, info.rows)
        return x + self.mlp_drop(self.mlp(self.mlp_norm(x), info), info.keys, info.rows)

    def before(self, x: Tensor, info: TokenInfo) -> tuple[Tensor, Tensor, Tensor]:
        """The token-wise part before the attention core; after() is the part that follows it."""
        return self.attn.project(self.attn_norm(x), info)

    def after(self, x: Tensor, y: Tensor, info: TokenInfo) -> Tensor:
        """The token-wise part after the attention core, whose output is y [batch, seq, heads, head_dim]."""
        x = x + self.attn_drop(self.attn.o(y.flatten(2)), info.keys, info.rows)
        return x + self.mlp_drop(self.mlp(self.mlp_norm(x), info), info.keys, info.rows)


def _mean(x: Tensor, info: TokenInfo | None) -> Tensor:
    return x.mean(1)


class Head(nn.Module):
    """Logits, or their summed cross-entropy computed in chunks. ViT averages over the patches first."""

    mean: Callable[[Tensor, TokenInfo | None], Tensor] = staticmethod(_mean)

    def __init__(self, m: Model):
        super().__init__()
        assert m.dim and m.vocab
        self.weight = nn.Parameter(torch.empty(m.vocab, m.dim))
        self.pool = m.is_classifier
        self.products: HeadProductsFactory = HeadProducts

    def forward(
        self, x: Tensor, targets: Tensor | None, valid: Tensor | None, smoothing: float, info: TokenInfo | None = None
    ) -> Tensor:
        x = self.mean(x, info) if self.pool else x
        if targets is None:
            return F.linear(x, self.weight)
        return linear_cross_entropy(x, self.weight, targets, valid, smoothing, products=self.products)


class Transformer(nn.Module):
    """Embedding, blocks, norm, head. With targets it returns the loss summed over valid targets; without, logits."""

    units = "blocks.*"
    """Modules that are sharded, recomputed and pipelined as a unit."""

    parts: ClassVar[dict[str, str]] = {
        "embed": "vocab",
        "positions": "scatter",
        "drop": "sequence",
        "blocks.*.attn.[qk]_norm": "heads",
        "blocks.*_norm": "sequence",
        "blocks.*_drop": "sequence",
        "blocks.*.attn": "region",
        "blocks.*.attn.[qkv]": "column",
        "blocks.*.attn.o": "row",
        "blocks.*.mlp.shared": "region",
        "blocks.*.mlp.router": "routed",
        "blocks.*.mlp.experts": "routed",
        "blocks.*.mlp": "region",
        "blocks.*.mlp.experts.*": "inside",
        "blocks.*.mlp.*gate": "column",
        "blocks.*.mlp.*up": "column",
        "blocks.*.mlp.*down": "row",
        "norm": "sequence",
        "head": "vocab_head",
    }
    """Role of each module under tensor parallelism, by the first pattern that matches its path; the roles are defined
    in parallel/tensor.py."""

    def __init__(self, m: Model):
        super().__init__()
        assert m.dim and m.vocab and m.layers and m.max_len and m.head_dim
        self.head_dim, self.theta, self.scaling = m.head_dim, m.rope_theta or 10_000.0, m.rope_scaling
        self.causal, self.rotary = bool(m.causal), m.positions == "rope"
        self.dim, self.depth = m.dim, m.layers
        self.embed: nn.Module | None = nn.Embedding(m.vocab, m.dim)
        if m.is_classifier:
            self.embed = nn.Linear(PATCH_DIM, m.dim)
        self.positions = nn.Embedding(m.max_len, m.dim) if m.positions == "learned" else None
        self.drop = Dropout(m.dropout or 0.0, site=0)
        self.blocks = nn.ModuleList(Block(m, i) for i in range(m.layers))
        self.norm: nn.Module | None = _norm(m, m.dim)
        self.head: Head | None = Head(m)
        self.aliases = {"head.weight": "embed.weight"} if m.tied else {}
        if m.tied:
            self.head.weight = cast(nn.Parameter, self.embed.weight)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, valid: Tensor | None = None, docs: Tensor | None = None,
        positions: Tensor | None = None, keys: Tensor | None = None, smoothing: float = 0.0,
        hidden: Tensor | None = None, rows: Tensor | None = None, length: int | None = None,
    ) -> Tensor:  # fmt: skip
        # inputs [batch, seq] tokens, or [batch, patches, PATCH_DIM]; hidden [batch, seq, dim] if another stage began;
        # rows and length: indices of these tokens and length of the sequence, if they are not all of it
        if rows is None:
            rows = torch.arange(inputs.shape[1], device=inputs.device)
        positions = rows if positions is None else positions
        angles = None
        if self.rotary:
            angles = rotation(positions, frequencies(self.head_dim, self.theta, self.scaling, inputs.device))
        info = TokenInfo(angles, docs, keys, rows, inputs.shape[1] if length is None else length, keys)
        x = self.begin(inputs, positions, info) if hidden is None else hidden
        for index, block in self.blocks.named_children():
            # each block has its own dropout keys but the same code, so that one compilation serves all
            own = None if keys is None or not self.drop.p else keys + salt(2 * int(index))
            x = block(x, info._replace(keys=own))
        if self.norm is None or self.head is None:
            return x
        return self.head(self.norm(x), targets, valid, smoothing, info)

    def begin(self, inputs: Tensor, positions: Tensor, info: TokenInfo) -> Tensor:
        """Embedding, positions and dropout."""
        assert self.embed is not None
        x = self.embed(inputs)
        if self.positions is not None:
            x = x + self.positions(positions)
        return self.drop(x, info.keys, info.rows)

    def keep(self, first: int, last: int, begins: bool, ends: bool) -> None:
        """Keep only blocks first … last - 1, the embedding if `begins` and the head if `ends`; names do not change."""
        for i in range(self.depth):
            if not first <= i < last:
                delattr(self.blocks, str(i))
        if not begins:
            self.embed = self.positions = None
        if not ends:
            self.norm = self.head = None

    def hidden_shape(self, inputs: Tensor, sequence_cut: int) -> tuple[int, ...]:
        """Shape of the activations between stages."""
        return inputs.shape[0], inputs.shape[1] // sequence_cut, self.dim


def _norm(m: Model, width: int) -> nn.Module:
    eps = m.norm_eps or 1e-5
    if m.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=eps)
    return nn.LayerNorm(width, eps=eps, bias=bool(m.bias))
