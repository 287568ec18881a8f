"""An encoder and a decoder that attends to its output, with relative positions (T5, Raffel et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model
from weft.models.attention import TokenInfo, masked_attention
from weft.models.attention_layer import Attention
from weft.models.decoder_inputs import shifted_right
from weft.models.dropout import Dropout, salt
from weft.models.feedforward import FeedForward
from weft.models.init import STD
from weft.models.norms import make_norm
from weft.models.transformer import Block, Head

CROSS_SITE = 1 << 20
"""Dropout site of cross attention, beyond those of all blocks (models/dropout.py)."""


class CrossAttention(Attention):
    """Queries of the decoder's tokens, keys and values of the encoder's output. A layout may replace `attend`."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor] = staticmethod(masked_attention)
    scale: float | None = None
    """Scale of the scores, where it is not 1 / √head_dim."""
    held: tuple[Tensor, Tensor] | None = None
    """Keys and values of an output that does not change, in generation."""

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, source, heads, head_dim] of the encoder's output."""
        memory = self.enter(memory)
        k, v = (self.whole_head(layer(memory)).unflatten(-1, (-1, self.head_dim)) for layer in (self.k, self.v))
        return k, v

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        q = self.q(self.enter(x)).unflatten(-1, (-1, self.head_dim))
        k, v = self.keys_values(memory) if self.held is None else self.held
        return self.output(self.attend(q, k, v, mask, self.scale))


def _gelu_in_parts(x: Tensor) -> Tensor:
    """GELU by tanh. In fp32 it is computed as published T5 models do, whose large logits show the rounding."""
    if x.dtype != torch.float32:
        return F.gelu(x, approximate="tanh")
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class DecoderBlock(Block):
    """Causal attention, attention to the encoder's output, and feed-forward, each added to the residual stream."""

    def __init__(self, m: Model, index: int, scale: float | None):
        super().__init__(m, index)
        assert m.dim
        self.cross_norm = make_norm(m, m.dim)
        self.cross = CrossAttention(m, index)
        self.cross.scale = scale
        self.cross_drop = Dropout(m.dropout or 0.0, site=CROSS_SITE)

    def forward(self, x: Tensor, info: TokenInfo, memory: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        assert self.attn_norm is not None and self.mlp_norm is not None
        x = x + self.attn_drop(self.attn(self.attn_norm(x), info), info.keys, info.rows)
        x = x + self.cross_drop(self.cross(self.cross_norm(x), memory, mask), info.keys, info.rows)
        return x + self.mlp_drop(self.mlp(self.mlp_norm(x), info), info.keys, info.rows)


def position_buckets(distance: Tensor, both_sides: bool, buckets: int, limit: int) -> Tensor:
    """The bucket of each distance (position of the key less that of the query): one for each short distance, then
    wider ones up to `limit`."""
    first = torch.zeros_like(distance)
    if both_sides:
        buckets //= 2
        first, distance = (distance > 0).long() * buckets, distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(limit / exact) * (buckets - exact)
    far = (exact + growth.long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


def position_scores(table: Tensor, queries: range, keys: range, both_sides: bool, limit: int) -> Tensor:
    """What a table [buckets, heads] adds to the scores of queries and keys at some positions: [heads, queries, keys]"""
    first, last = keys.start - queries.stop + 1, keys.stop - queries.start
    distances = torch.arange(first, last, device=table.device)
    of_distances = F.embedding(position_buckets(distances, both_sides, len(table), limit), table)
    out: Tensor = _Spread.apply(of_distances.t(), len(queries))
    return out


class _Spread(torch.autograd.Function):
    """From one value a distance, [heads, distances], to one for each query and key. Gradients are summed in fp32."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, queries: int) -> Tensor:
        return values.unfold(1, values.shape[1] - queries + 1, 1).flip(1)  # a window of distances for each query

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        heads, queries, keys = grads[0].shape
        distances = queries + keys - 1
        # rows that are one longer than the distances, read as rows of the distances: each is one further to the right
        shifted = F.pad(grads[0].flip(1), (0, queries)).flatten(1)[:, : queries * distances]
        summed = shifted.view(heads, queries, distances).sum(1, dtype=torch.float32)
        return summed.to(grads[0].dtype), None


def source_mask(info: TokenInfo) -> Tensor | None:
    """Which tokens of a source the decoder attends to, [batch, 1, 1, source]: padding is another document."""
    return None if info.docs is None else (info.docs == info.docs[:, :1])[:, None, None]


def _all_positions(info: TokenInfo) -> tuple[range, range]:
    return range(info.length), range(info.length)


def _all_heads(table: Tensor) -> Tensor:
    return table


class EncoderDecoder(nn.Module):
    """Embedding, blocks of the encoder, blocks of the decoder, norm, head. With targets it returns the loss summed over
    valid targets; without, logits.

    Between blocks both streams are in one tensor, the source's tokens before the target's: the last stages of a
    pipeline need the encoder's output, and the first ones pass the embedded target on.

    Context parallelism replaces `positions` (those of the queries and keys whose scores this rank computes),
    `own_heads` (of a table [buckets, heads], the heads it computes) and `source_mask`.
    """

    takes_decoder_inputs = True
    context_attention = "weft.extensions.encoders.whole_keys:WholeKeys"
    """Its attention over the ranks of cp."""
    positions: Callable[[TokenInfo], tuple[range, range]] = staticmethod(_all_positions)
    own_heads: Callable[[Tensor], Tensor] = staticmethod(_all_heads)
    source_mask: Callable[[TokenInfo], Tensor | None] = staticmethod(source_mask)

    units = "blocks.*"
    shared = ("encoder_bias.weight", "decoder_bias.weight")
    """Small weights that every stage of a pipeline holds."""

    parts: ClassVar[dict[str, str]] = {
        "embed": "vocab",
        "*_bias": "head_table",
        "*drop": "sequence",
        "blocks.*_norm": "sequence",
        "blocks.*.attn": "region",
        "blocks.*.cross": "region",
        "blocks.*.[ac]*.[qkv]": "column",
        "blocks.*.[ac]*.o": "row",
        "blocks.*.mlp": "region",
        "blocks.*.mlp.gate": "column",
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
        "encoder_norm": "sequence",
        "norm": "sequence",
        "head": "vocab_head",
    }

    def __init__(self, m: Model):
        super().__init__()
        assert m.dim and m.vocab and m.layers and m.encoder_layers and m.heads and m.position_buckets
        self.dim, self.depth, self.encoder_depth = m.dim, m.layers, m.encoder_layers
        self.buckets, self.limit = m.position_buckets, m.position_limit or 128
        self.head_scale = 1.0 if m.head_scale is None else m.head_scale
        self.keyed = bool(m.dropout)
        self.embedding_std = 1.0 if m.tied else STD  # a tied head is scaled down
        self.borrowed: tuple[str, ...] = ()
        """Weights that belong to the first stage."""
        self.embed: nn.Module | None = nn.Embedding(m.vocab, m.dim)
        self.encoder_bias = nn.Embedding(m.position_buckets, m.heads)
        self.decoder_bias = nn.Embedding(m.position_buckets, m.heads)
        self.source_drop, self.target_drop, self.memory_drop, self.out_drop = (
            Dropout(m.dropout or 0.0, site=-i) for i in range(1, 5)
        )
        self.scale = m.attention_scale  # given to the kernel, since a factor on the queries would be rounded
        encoder, decoder = (m.model_copy(update={"causal": c, "attention_scale": None}) for c in (False, True))
        blocks: dict[str, nn.Module] = {f"encoder{i}": Block(encoder, i) for i in range(m.encoder_layers)}
        blocks |= {f"decoder{i}": DecoderBlock(decoder, i, self.scale) for i in range(m.layers - m.encoder_layers)}
        self.blocks = nn.ModuleDict(blocks)
        for part in self.blocks.modules():
            if isinstance(part, FeedForward) and m.activation in ("gelu", "geglu"):
                part.activation = _gelu_in_parts
        self.names = list(self.blocks)
        self.encoder_norm: nn.Module | None = make_norm(m, m.dim)
        self.norm: nn.Module | None = make_norm(m, m.dim)
        self.head: Head | None = Head(m)
        self.aliases = {"head.weight": "embed.weight"} if m.tied else {}
        if m.tied:
            self.head.weight = cast(nn.Parameter, self.embed.weight)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, valid: Tensor | None = None, docs: Tensor | None = None,
        decoder_inputs: Tensor | None = None, keys: Tensor | None = None, smoothing: float = 0.0,
        hidden: Tensor | None = None, rows: Tensor | None = None, length: int | None = None,
        decoder_rows: Tensor | None = None, decoder_length: int | None = None,
    ) -> Tensor:  # fmt: skip
        # inputs [batch, source] and targets [batch, target] tokens; docs [batch, source] number documents, of which
        # padding is one; hidden [batch, source + target, dim] if another stage began;
        # rows and length: indices of these tokens and length of the source, if they are not all of it; decoder_rows and
        # decoder_length: the same of the target
        if decoder_inputs is None:
            assert targets is not None, "an encoder-decoder needs targets or decoder_inputs"
            decoder_inputs = shifted_right(targets, valid)
        source, target = inputs.shape[1], decoder_inputs.shape[1]
        info = self._info(inputs, rows, length, docs, keys)
        own = self._info(decoder_inputs, decoder_rows, decoder_length, None, keys)
        if hidden is None:
            assert self.embed is not None
            memory = self.source_drop(self.embed(inputs), keys, info.rows)
            x = self.target_drop(self.embed(decoder_inputs), keys, own.rows)
        else:
            cut = source * hidden.shape[1] // (source + target)  # tp may have cut both streams
            memory, x = hidden[:, :cut], hidden[:, cut:]
        if any(name.startswith("encoder") for name in self.blocks):
            info = info._replace(bias=self.bias(self.encoder_bias, *self.positions(info), True))
        if any(name.startswith("decoder") for name in self.blocks):
            own = own._replace(bias=self.bias(self.decoder_bias, *self.positions(own), False))
        mask = self.source_mask(info)
        for name, block in self.blocks.items():
            index = self.names.index(name)
            salted = None if keys is None or not self.keyed else keys + salt(2 * index)
            if index < self.encoder_depth:
                memory = block(memory, info._replace(keys=salted))
                continue
            if index == self.encoder_depth:
                memory = self.finish_encoder(memory, keys, info.rows)
            x = block(x, own._replace(keys=salted), memory, mask)
        if self.head is None:
            return torch.cat((memory, x), 1)
        return self.finish(x, keys, own.rows, targets, valid, smoothing)

    def _info(
        self, tokens: Tensor, rows: Tensor | None, length: int | None, docs: Tensor | None, keys: Tensor | None
    ) -> TokenInfo:
        rows = torch.arange(tokens.shape[1], device=tokens.device) if rows is None else rows
        return TokenInfo(None, docs, keys, rows, length or tokens.shape[1], keys, scale=self.scale)

    def bias(self, table: nn.Embedding, queries: range, keys: range, both_sides: bool) -> Tensor:
        """What relative positions add to the scores: [heads, queries, keys]."""
        buckets = torch.arange(self.buckets, device=table.weight.device)
        return position_scores(self.own_heads(table(buckets)), queries, keys, both_sides, self.limit)

    def encode(self, inputs: Tensor, docs: Tensor | None) -> Tensor:
        """The output of the encoder for a source [batch, source], without dropout: [batch, source, dim]"""
        assert self.embed is not None
        info = self._info(inputs, None, None, docs, None)
        info = info._replace(bias=self.bias(self.encoder_bias, *self.positions(info), True))
        memory = self.embed(inputs)
        for name in self.names[: self.encoder_depth]:
            memory = self.blocks[name](memory, info)
        return self.finish_encoder(memory, None, info.rows)

    def finish_encoder(self, memory: Tensor, keys: Tensor | None, rows: Tensor) -> Tensor:
        """The output of the encoder, from that of its last block."""
        assert self.encoder_norm is not None
        out: Tensor = self.memory_drop(self.encoder_norm(memory), keys, rows)
        return out

    def finish(
        self, x: Tensor, keys: Tensor | None, rows: Tensor, targets: Tensor | None, valid: Tensor | None,
        smoothing: float,
    ) -> Tensor:  # fmt: skip
        """Logits or loss, from the output of the last block."""
        assert self.norm is not None and self.head is not None
        return self.head(self.out_drop(self.norm(x), keys, rows) * self.head_scale, targets, valid, smoothing)

    def keep(self, first: int, last: int, begins: bool, ends: bool) -> None:
        """Keep only blocks first … last - 1, the embedding if `begins` and the head if `ends`; names do not change."""
        for i, name in enumerate(self.names):
            if not first <= i < last:
                del self.blocks[name]
        if not begins:
            self.embed, self.borrowed = None, self.shared
        if not first <= self.encoder_depth < last:
            self.encoder_norm = None
        if not ends:
            self.norm = self.head = None

    def hidden_shape(self, batch: dict[str, Tensor], sequence_cut: int) -> tuple[int, ...]:
        """Shape of the activations between stages."""
        source, target = batch["inputs"].shape[1], batch["targets"].shape[1]
        return batch["inputs"].shape[0], (source + target) // sequence_cut, self.dim
