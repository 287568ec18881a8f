"""The core of attention: the fastest kernel at hand for the device and the mask."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Mask = Any
"""None, a dense tensor that is True where a token may look, or FlexAttention's BlockMask."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, causal: bool) -> Tensor:
    """Attention of q [batch, heads, seq, head_dim] over k and v, which may have fewer heads."""
    if q.is_cuda and mask is None and q.dtype != torch.float32 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128:
        return _cudnn(q, k, v, causal)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """cuDNN's kernel by its own name: torch's dispatcher prefers flash, which is slower on Hopper."""
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, torch.is_grad_enabled(), 0.0, causal, False
    )[0]
    return out
