"""One transformer that covers GPT-2, Llama, their relatives, BERT and ViT by configuration, without parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model
from weft.models.attention import TokenInfo
from weft.models.attention_layer import Attention
from weft.models.documents import segments_of
from weft.models.dropout import Dropout, salt
from weft.models.experts.mixture_of_experts import MixtureOfExperts
from weft.models.feedforward import FeedForward, make_activation
from weft.models.latent_attention import LatentAttention
from weft.models.lora import Adapter
from weft.models.loss import HeadProductsFactory, Record, head_products, linear_cross_entropy
from weft.models.norms import make_norm
from weft.models.patches import ImagePatches, PatchEmbedding
from weft.models.rope import attention_factor, frequencies, rotation


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream; norms at their inputs, outputs or both, or of the
    residual stream after each."""

    adapters: tuple[Adapter, ...] = ()
    """Adapters with dropout, whose masks depend on the tokens."""

    def __init__(self, m: Model, index: int):
        super().__init__()
        assert m.dim
        inputs, outputs = m.norm_at in (None, "input", "both"), m.norm_at in ("output", "both")
        residual = m.norm_at == "residual"
        self.parallel = bool(m.parallel_residual)
        self.attn_norm = make_norm(m, m.dim) if inputs else None
        self.attn = Attention(m, index) if m.latent is None else LatentAttention(m, index)
        self.attn_out_norm = make_norm(m, m.dim) if outputs else None
        self.attn_sum_norm = make_norm(m, m.dim) if residual else None
        self.attn_drop = Dropout(m.dropout or 0.0, site=1)
        self.mlp_norm = make_norm(m, m.dim) if inputs else None
        routed = m.experts is not None and index >= m.experts.first_dense
        self.mlp = MixtureOfExperts(m) if routed else FeedForward(m)
        self.mlp_out_norm = make_norm(m, m.dim) if outputs else None
        self.mlp_sum_norm = make_norm(m, m.dim) if residual else None
        self.mlp_drop = Dropout(m.dropout or 0.0, site=2)

    def forward(self, x: Tensor, info: TokenInfo, attended: Tensor | None = None) -> Tensor:
        for adapter in self.adapters:
            adapter.tokens = info
        y, normed = self.attend(x, info, attended)
        fed = self.mlp(normed, info)
        z = y + _dropped(self.mlp_drop, _optional(self.mlp_out_norm, fed), info)
        return _optional(self.mlp_sum_norm, z)

    def attend(self, x: Tensor, info: TokenInfo, attended: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and the input of the feed-forward part."""
        if attended is None:
            attended = self.attn(_optional(self.attn_norm, x), info)
        y = x + _dropped(self.attn_drop, _optional(self.attn_out_norm, attended), info)
        y = _optional(self.attn_sum_norm, y)
        return y, _optional(self.mlp_norm, x if self.parallel else y)

    def before(self, x: Tensor, info: TokenInfo) -> tuple[Tensor, Tensor, Tensor]:
        """The token-wise part before the attention core; after() is the part that follows it."""
        for adapter in self.adapters:
            adapter.tokens = info
        return self.attn.project(_optional(self.attn_norm, x), info)

    def after(self, x: Tensor, y: Tensor, info: TokenInfo) -> Tensor:
        """The token-wise part after the attention core, whose output is y [batch, seq, heads, head_dim]."""
        return Block.forward(self, x, info, self.attn.output(y))


def _optional(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _dropped(drop: Dropout, x: Tensor, info: TokenInfo) -> Tensor:
    return x if drop.p == 0 else drop(x, info.keys, info.rows)


def _mean(x: Tensor, info: TokenInfo | None) -> Tensor:
    return x.mean(1)


def _first(x: Tensor, info: TokenInfo | None) -> Tensor:
    return x[:, 0]


class Head(nn.Module):
    """Logits, or their summed cross-entropy computed in chunks. For one label a sample, ViT averages over the patches
    first or takes the class token, and BERT has a layer on the first token."""

    mean: Callable[[Tensor, TokenInfo | None], Tensor] = staticmethod(_mean)
    first: Callable[[Tensor, TokenInfo | None], Tensor] = staticmethod(_first)
    record: Record | None = None
    """Called with the losses of the targets."""

    def __init__(self, m: Model):
        super().__init__()
        assert m.dim and m.vocab
        self.weight = nn.Parameter(torch.empty(m.outputs, m.dim))
        self.bias = nn.Parameter(torch.empty(m.outputs)) if m.has_head_bias else None
        self.pool = m.labels_samples
        self.by_first = bool(m.class_token)
        self.pooler = nn.Linear(m.dim, m.dim) if m.classes else None
        self.products: HeadProductsFactory = head_products

    def pooled(self, x: Tensor, info: TokenInfo | None) -> Tensor:
        """One vector a sample, where it has one label: [batch, dim]."""
        if not self.pool:
            return x
        if self.pooler is None:
            return (self.first if self.by_first else self.mean)(x, info)
        return torch.tanh(self.pooler(self.first(x, info)))

    def forward(
        self, x: Tensor, targets: Tensor | None, valid: Tensor | None, smoothing: float, info: TokenInfo | None = None
    ) -> Tensor:
        x = self.pooled(x, info)
        if targets is None:
            return F.linear(x, self.weight, self.bias)
        return linear_cross_entropy(
            x, self.weight, targets, valid, smoothing, products=self.products, bias=self.bias, record=self.record
        )


class Transformer(nn.Module):
    """Embedding, blocks, norm, head. With targets it returns the loss summed over valid targets; without, logits."""

    units = "blocks.*"
    """Modules that are sharded, recomputed and pipelined as a unit."""

    parts: ClassVar[dict[str, str]] = {
        "embed": "vocab",
        "positions": "scatter",
        "types": "scatter",
        "embed_norm": "sequence",
        "drop": "sequence",
        "blocks.*.attn.sinks": "by_head",
        "blocks.*.attn.[qk]_norm": "heads",
        "blocks.*.attn.*_a_norm": "heads",
        "blocks.*.attn.*_a": "heads",
        "blocks.*.attn.*_b": "column",
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
        "blocks.*.mlp.shared_gate": "sequence",
        "blocks.*.mlp.*gate": "column",
        "blocks.*.mlp.*up": "column",
        "blocks.*.mlp.*down": "row",
        "transform": "sequence",
        "norm": "sequence",
        "head": "vocab_head",
        "head.pooler": "heads",
    }
    """Role of each module under tensor parallelism, by the first pattern that matches its path; the roles are defined
    in parallel/tensor.py."""

    def __init__(self, m: Model):
        super().__init__()
        assert m.dim and m.vocab and m.layers and m.max_len and m.head_dim
        self.rope_dim, self.theta, self.scaling = m.rope_dim or m.head_dim, m.rope_theta or 10_000.0, m.rope_scaling
        self.window_theta = m.window_theta if m.window is not None else None
        self.embedding_scale = m.embedding_scale
        self.causal, self.rotary = bool(m.causal), m.positions == "rope"
        self.dim, self.depth = m.dim, m.layers
        self.embed: nn.Module | None = nn.Embedding(m.vocab, m.dim)
        self.images = ImagePatches(m) if m.takes_patches else None
        if m.takes_patches:
            self.embed = (PatchEmbedding if m.class_token else nn.Linear)(m.patch_dim, m.dim)
        self.positions = nn.Embedding(m.max_len, m.dim) if m.positions == "learned" else None
        self.types = nn.Embedding(m.token_types, m.dim) if m.token_types else None
        self.embed_norm = make_norm(m, m.dim) if m.hides_tokens else None
        self.drop = Dropout(m.dropout or 0.0, site=0)
        self.keyed = bool(m.dropout or (m.lora and m.lora.dropout))
        self.blocks = nn.ModuleList(Block(m, i) for i in range(m.layers))
        self.transform = nn.Linear(m.dim, m.dim) if m.hides_tokens and not m.classes else None
        self.transform_activation = make_activation(m)
        self.norm: nn.Module | None = None if m.classes else make_norm(m, m.dim)
        self.head: Head | None = Head(m)
        self.aliases = {"head.weight": "embed.weight"} if m.tied else {}
        if m.tied:
            self.head.weight = cast(nn.Parameter, self.embed.weight)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, valid: Tensor | None = None, docs: Tensor | None = None,
        positions: Tensor | None = None, keys: Tensor | None = None, smoothing: float = 0.0,
        hidden: Tensor | None = None, rows: Tensor | None = None, length: int | None = None,
        types: Tensor | None = None, features: bool = False,
    ) -> Tensor:  # fmt: skip
        # inputs [batch, seq] tokens, [batch, patches, values] or [batch, colours, height, width];
        # hidden [batch, seq, dim] if another stage began;
        # rows and length: indices of these tokens and length of the sequence, if they are not all of it;
        # types [batch, seq]: kinds of tokens, by default 0; features: return the output of the last block
        if self.images is not None and inputs.dim() == 4:
            inputs = self.images(inputs)
        segments = None
        if rows is None:
            rows = torch.arange(inputs.shape[1], device=inputs.device)
            segments = None if docs is None else segments_of(docs)
        positions = rows if positions is None else positions
        length = inputs.shape[1] if length is None else length
        angles = window_angles = None
        if self.rotary:
            freq = frequencies(self.rope_dim, self.theta, self.scaling, inputs.device, length)
            angles = rotation(positions, freq, attention_factor(self.scaling))
            if self.window_theta is not None:
                window_angles = rotation(positions, frequencies(self.rope_dim, self.window_theta, None, inputs.device))
        info = TokenInfo(angles, docs, keys, rows, length, keys, window_angles, segments=segments)
        x = self.begin(inputs, positions, info, types) if hidden is None else hidden
        for index, block in self.blocks.named_children():
            # each block has its own dropout keys but the same code, so that one compilation serves all
            own = None if keys is None or not self.keyed else keys + salt(2 * int(index))
            x = block(x, info._replace(keys=own))
        if self.head is None or features:
            return _optional(self.norm, x) if features and self.images is not None else x
        if self.transform is not None:
            x = self.transform_activation(self.transform(x))
        return self.head(_optional(self.norm, x), targets, valid, smoothing, info)

    def begin(self, inputs: Tensor, positions: Tensor, info: TokenInfo, types: Tensor | None = None) -> Tensor:
        """Embedding, positions, token types and dropout."""
        assert self.embed is not None
        x = self.embed(inputs, info.rows) if isinstance(self.embed, PatchEmbedding) else self.embed(inputs)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(inputs) if types is None else types)
        return _dropped(self.drop, _optional(self.embed_norm, x), info)

    def keep(self, first: int, last: int, begins: bool, ends: bool) -> None:
        """Keep only blocks first … last - 1, the embedding if `begins` and the head if `ends`; names do not change."""
        for i in range(self.depth):
            if not first <= i < last:
                delattr(self.blocks, str(i))
        if not begins:
            self.embed = self.positions = self.types = self.embed_norm = None
        if not ends:
            self.transform = self.norm = self.head = None

    def hidden_shape(self, batch: dict[str, Tensor], sequence_cut: int) -> tuple[int, ...]:
        """Shape of the activations between stages."""
        inputs = batch["inputs"]
        return inputs.shape[0], inputs.shape[1] // sequence_cut, self.dim
