"""The norms of a transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model


class OffsetRMSNorm(nn.RMSNorm):
    """RMS norm whose weights are differences from 1 (Gemma)."""

    initial = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class WideRMSNorm(nn.RMSNorm):
    """RMS norm over all heads of the queries or keys together (OLMo 2); tensor parallelism splits its width."""

    def mean_square(self, x: Tensor) -> Tensor:
        """Mean of the squares of x [batch, seq, width] over the width."""
        return x.square().mean(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(self.mean_square(wide) + (self.eps or 0.0))
        return (wide * scale).to(x.dtype) * self.local_weight().to(x.dtype)

    def local_weight(self) -> Tensor:
        return self.weight


class Fp32LayerNorm(nn.LayerNorm):
    """Layer norm in fp32. A CPU's kernel for bf16 adds up the gradients of its weights in bf16, so they depend on the
    number of tokens that are added: in a small CLIP by 4 % between whole and half batches."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            wide = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return wide.to(x.dtype)


def make_norm(m: Model, width: int) -> nn.Module:
    """The norm of a model over `width` values."""
    eps = m.norm_eps or 1e-5
    if m.norm == "layernorm":
        return nn.LayerNorm(width, eps=eps, bias=bool(m.bias))
    return (OffsetRMSNorm if m.norm == "rmsnorm_offset" else nn.RMSNorm)(width, eps=eps)


def make_qk_norm(m: Model, heads: int) -> nn.Module | None:
    """The norm of queries or keys: of each head, or of all heads together."""
    assert m.head_dim
    if m.qk_norm == "all":
        return WideRMSNorm(heads * m.head_dim, eps=m.norm_eps or 1e-5)
    return make_norm(m, m.head_dim) if m.qk_norm else None
