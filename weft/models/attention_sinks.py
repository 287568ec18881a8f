"""Attention in which each head has a learned score that takes part in the softmax and has no value (gpt-oss)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.shards import local_of
from weft.models.attention import TokenInfo, attention_mask
from weft.models.attention_kernels import HALF, KeyLimits, attend, attend_backward


class AttentionSinks(nn.Module):
    """The scores of a layer's heads; tensor parallelism splits them."""

    initial = 0.0

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self) -> Tensor:
        return local_of(self.weight)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    """Attention where `mask` [queries, keys] or [batch, 1, queries, keys] is true. The sink is a key of zeros, whose
    score comes from an additive mask."""
    mask = mask if mask.dim() == 4 else mask[None, None]
    seen = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
    seen = seen.expand(-1, len(sinks), -1, -1)
    scores = torch.cat((seen, sinks.to(q.dtype).view(1, -1, 1, 1).expand(len(seen), -1, q.shape[1], 1)), -1)
    k, v = (F.pad(t, (0, 0, 0, 0, 0, 1)).transpose(1, 2) for t in (k, v))
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=scores, enable_gqa=q.shape[2] != k.shape[1])
    return y.transpose(1, 2)


@torch.compiler.disable
def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, causal: bool, info: TokenInfo) -> Tensor:
    """All tokens on this device: by the kernels that return the log-sum-exp, unless documents need a mask."""
    assert info.sinks is not None
    if info.docs is not None and (info.segments is None or q.dtype not in HALF):
        mask = attention_mask(q, causal, info)
        assert mask is not None
        return masked_attention(q, k, v, mask, info.sinks)
    out: Tensor = _SinkAttention.apply(q, k, v, info.sinks, info.limits(causal))
    return out


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp with sinks, from those without: a sink adds to the log-sum-exp and nothing to the
    output. The backward pass of a kernel takes both as they are."""
    total = torch.logaddexp(lse, sinks.float().view(1, -1, 1))  # [batch, heads, queries]
    return (out * (lse - total).exp().transpose(1, 2).unsqueeze(-1)).to(out.dtype), total


def sinks_gradient(dout: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of a sink's score is its probability times the change of the output, whose value is 0."""
    change = (dout.float() * out.float()).sum(-1).transpose(1, 2)  # [batch, heads, queries]
    share = (sinks.float().view(1, -1, 1) - total).exp()
    return -(share * change).sum((0, 2)).to(sinks.dtype)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, limits: KeyLimits) -> Tensor:
        out, total = add_sinks(*attend(q, k, v, limits), sinks)
        ctx.save_for_backward(q, k, v, sinks, out, total)
        ctx.limits = limits
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, total = ctx.saved_tensors
        dout = grads[0].contiguous()
        dsinks = sinks_gradient(dout, out, total, sinks)
        return *attend_backward(dout, q, k, v, out, total, ctx.limits), dsinks, None
