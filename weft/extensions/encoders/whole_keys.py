"""Context parallelism of an encoder with a decoder: each rank attends to all keys at once.

Relative positions are learned scores [heads, queries, keys], which a rank needs for all keys anyway, so a ring that
holds some keys at a time would save little. Keys and values of all ranks are gathered (`ring`), or each rank gets the
whole sequence of some heads (`ulysses`), or first the latter inside groups and then the former (`hybrid`). Cross
attention does the same with queries of the target and keys of the source.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.extensions.encoders.encoder_decoder import CrossAttention, EncoderDecoder, source_mask
from weft.models.attention import TokenInfo, biased, masked_attention
from weft.parallel.context.context_attention import Context, ToHeads, ToRows


class WholeKeys(Context):
    """Attention of an EncoderDecoder over the ranks of cp."""

    def span(self, module: nn.Module) -> None:
        """Make a module's part in attention span the ranks of cp."""
        if isinstance(module, CrossAttention):
            module.attend = self.attend
        elif isinstance(module, EncoderDecoder):
            module.positions, module.own_heads, module.source_mask = self.positions, self.own_heads, self.source_mask
        else:
            super().span(module)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, info: TokenInfo) -> Tensor:
        assert info.bias is not None, "an encoder with a decoder has relative positions"
        mask = self.mask(causal, info)
        return self.attend(q, k, v, biased(info.bias.to(q.dtype), mask), info.scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """From this rank's queries, keys and values to the output of its queries; `mask` is for the scores that it
        computes."""
        if self.cut.ulysses > 1:
            k, v = self.spread(k), self.spread(v)
            if q.shape[1] == k.shape[1]:
                q, k, v = ToHeads.apply(self, q, k, v)
            else:
                (q,), (k, v) = ToHeads.apply(self, q), ToHeads.apply(self, k, v)
        if self.cut.ring > 1:
            k, v = _Gather.apply(self, k, v)
        out = masked_attention(q, k, v, mask, scale)
        return ToRows.apply(self, out) if self.cut.ulysses > 1 else out

    def positions(self, info: TokenInfo) -> tuple[range, range]:
        """The positions of the queries and keys whose scores this rank computes, with padding."""
        keys = self.cut.padded(info.length)
        own = keys // self.cut.ring
        return range(self.cut.group * own, (self.cut.group + 1) * own), range(keys)

    def own_heads(self, table: Tensor) -> Tensor:
        """The heads that this rank computes, of a table [buckets, heads]."""
        return table.chunk(self.cut.ulysses, 1)[self.cut.rank % self.cut.ulysses]

    def mask(self, causal: bool, info: TokenInfo) -> Tensor | None:
        """True where a token may attend, [batch or 1, 1, queries, keys]; padding attends to padding."""
        places = (torch.arange(p.start, p.stop, device=info.rows.device) for p in self.positions(info))
        (queries, keys), seen = places, None
        if info.docs is not None:
            docs = F.pad(info.docs, (0, len(keys) - info.length))
            seen = docs[:, queries].unsqueeze(2) == docs.unsqueeze(1)
        if len(keys) > info.length:
            alike = (queries < info.length).unsqueeze(1) == (keys < info.length)
            seen = alike if seen is None else seen & alike
        if causal:
            before = keys <= queries.unsqueeze(1)
            seen = before if seen is None else seen & before
        return None if seen is None else seen.view(-1, 1, len(queries), len(keys))

    def source_mask(self, info: TokenInfo) -> Tensor | None:
        """Which tokens of the whole source, with padding, the decoder attends to: [batch or 1, 1, 1, keys]."""
        padding, mask = self.cut.padded(info.length) - info.length, source_mask(info)
        if mask is None and padding:
            mask = torch.ones(1, 1, 1, info.length, dtype=torch.bool, device=info.rows.device)
        return None if mask is None else F.pad(mask, (0, padding))

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors [batch, tokens, heads, head_dim] of all groups, in the order of the sequence."""
        own = torch.stack(tensors)
        got = self.axis.all_to_all(own.expand(self.cut.ring, *own.shape), self._across)  # [groups, tensors, b, s, h, d]
        return got.movedim(0, 2).flatten(2, 3).unbind(0)

    def sum_back(self, *grads: Tensor) -> tuple[Tensor, ...]:
        """The gradients of gather()'s inputs: of this rank's tokens, the sum over all groups, in fp32."""
        shards = torch.stack(grads).unflatten(2, (self.cut.ring, -1)).movedim(2, 0)
        got = self.axis.all_to_all(shards, self._across)
        return got.sum(0, dtype=torch.float32).to(got.dtype).unbind(0)

    @property
    def _across(self) -> range:
        """The ranks with this one's heads, one in each group."""
        return range(self.cut.rank % self.cut.ulysses, self.axis.size, self.cut.ulysses)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: WholeKeys, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.context = context
        return context.gather(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.context.sum_back(*grads)
