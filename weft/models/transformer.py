"""One transformer that covers GPT-2, Llama and ViT by configuration; it knows nothing of how it is spread."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model
from weft.job.shapes import PATCH_DIM
from weft.models.attention import Where, attention
from weft.models.dropout import Dropout, salt
from weft.models.experts import MixtureOfExperts
from weft.models.feedforward import FeedForward
from weft.models.loss import Factory, Products, linear_cross_entropy
from weft.models.rope import frequencies, rotate, rotation

Core = Callable[[Tensor, Tensor, Tensor, bool, Where], Tensor]
"""Queries, keys and values [batch, seq, heads, head_dim], causal or not, and what is known of the tokens."""


def _unchanged(x: Tensor) -> Tensor:
    return x


class Attention(nn.Module):
    """Grouped-query attention. Heads are counted from the width of q, k and v, so any share of them works.

    `enter` brings in what a layout keeps elsewhere; `core` may be another layout's attention.
    """

    core: Core = staticmethod(attention)
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

    def project(self, x: Tensor, where: Where) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, turned to their places."""
        x = self.enter(x)
        batch, seq, _ = x.shape
        q = self.q(x).view(batch, seq, -1, self.head_dim)
        k = self.k(x).view(batch, seq, -1, self.head_dim)
        v = self.v(x).view(batch, seq, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if where.turn is not None:
            q, k = rotate(q, where.turn), rotate(k, where.turn)
        return q, k, v

    def forward(self, x: Tensor, where: Where) -> Tensor:
        y = self.core(*self.project(x, where), self.causal, where)
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

    def forward(self, x: Tensor, where: Where) -> Tensor:
        x = x + self.attn_drop(self.attn(self.attn_norm(x), where), where.keys, where.rows)
        return x + self.mlp_drop(self.mlp(self.mlp_norm(x), where), where.keys, where.rows)

    def before(self, x: Tensor, where: Where) -> tuple[Tensor, Tensor, Tensor]:
        """What comes before the attention's core. With after() it is the whole block, and token by token."""
        return self.attn.project(self.attn_norm(x), where)

    def after(self, x: Tensor, y: Tensor, where: Where) -> Tensor:
        """What comes after the core, which gave y [batch, seq, heads, head_dim]."""
        x = x + self.attn_drop(self.attn.o(y.flatten(2)), where.keys, where.rows)
        return x + self.mlp_drop(self.mlp(self.mlp_norm(x), where), where.keys, where.rows)


def _mean(x: Tensor, where: Where | None) -> Tensor:
    return x.mean(1)


class Head(nn.Module):
    """Logits, or their summed cross-entropy without ever holding them all. ViT averages over the patches first."""

    mean: Callable[[Tensor, Where | None], Tensor] = staticmethod(_mean)

    def __init__(self, m: Model):
        super().__init__()
        assert m.dim and m.vocab
        self.weight = nn.Parameter(torch.empty(m.vocab, m.dim))
        self.pool = m.is_classifier
        self.products: Factory = Products

    def forward(
        self, x: Tensor, targets: Tensor | None, valid: Tensor | None, smoothing: float, where: Where | None = None
    ) -> Tensor:
        x = self.mean(x, where) if self.pool else x
        if targets is None:
            return F.linear(x, self.weight)
        return linear_cross_entropy(x, self.weight, targets, valid, smoothing, products=self.products)


class Transformer(nn.Module):
    """Embedding, blocks, norm, head. With targets it returns the loss summed over valid targets; without, logits."""

    units = "blocks.*"
    """The parts that are sharded, recomputed and pipelined as one."""

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
    """Which module plays which part under tensor parallelism; the first pattern that fits its path decides.
    parallel/tensor.py says what each part does."""

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
        # rows and length: which tokens of how many these are, if they are not all
        if rows is None:
            rows = torch.arange(inputs.shape[1], device=inputs.device)
        positions = rows if positions is None else positions
        turn = None
        if self.rotary:
            turn = rotation(positions, frequencies(self.head_dim, self.theta, self.scaling, inputs.device))
        where = Where(turn, docs, keys, rows, inputs.shape[1] if length is None else length, keys)
        x = self.begin(inputs, positions, where) if hidden is None else hidden
        for index, block in self.blocks.named_children():
            # every block drops by sites of its own, yet runs the same code: what is compiled for one fits all
            own = None if keys is None or not self.drop.p else keys + salt(2 * int(index))
            x = block(x, where._replace(keys=own))
        if self.norm is None or self.head is None:
            return x
        return self.head(self.norm(x), targets, valid, smoothing, where)

    def begin(self, inputs: Tensor, positions: Tensor, where: Where) -> Tensor:
        """What comes before the blocks."""
        assert self.embed is not None
        x = self.embed(inputs)
        if self.positions is not None:
            x = x + self.positions(positions)
        return self.drop(x, where.keys, where.rows)

    def keep(self, first: int, last: int, begins: bool, ends: bool) -> None:
        """Keep the blocks first … last - 1, the embedding if the stage begins, the head if it ends; names stay."""
        for i in range(self.depth):
            if not first <= i < last:
                del self.blocks._modules[str(i)]
        if not begins:
            self.embed = self.positions = None
        if not ends:
            self.norm = self.head = None

    def hidden_shape(self, inputs: Tensor, sequence_cut: int) -> tuple[int, ...]:
        """Shape of what one stage hands to the next."""
        return inputs.shape[0], inputs.shape[1] // sequence_cut, self.dim


def _norm(m: Model, width: int) -> nn.Module:
    eps = m.norm_eps or 1e-5
    if m.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=eps)
    return nn.LayerNorm(width, eps=eps, bias=bool(m.bias))
