"""Multi-head latent attention (DeepSeek-V2 §2.1): keys and values are expanded from one small vector a token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Model
from weft.models.attention import TokenInfo
from weft.models.attention_layer import Attention
from weft.models.rope import rotate

LATENT_EPS = 1e-6
"""Epsilon of the norms of the latent vectors."""


class LatentAttention(Attention):
    """Queries, keys and values from latent vectors. Each head has a rotated part of rope_dim values, which is first and
    of which all heads share the key, and one without positions."""

    def __init__(self, m: Model, index: int = 0):
        nn.Module.__init__(self)
        latent = m.latent
        assert latent and m.dim and m.heads and m.head_dim and m.rope_dim
        self.set_options(m, index)
        self.rope_dim, self.kv_rank, self.v_dim = m.rope_dim, latent.kv_rank, latent.v_dim
        self.k = self.v = self.q_norm = self.k_norm = self.sinks = None  # type: ignore[assignment]
        width = m.heads * m.head_dim
        if latent.q_rank is None:
            self.q, self.q_a, self.q_a_norm, self.q_b = nn.Linear(m.dim, width, bias=False), None, None, None
        else:
            self.q = None  # type: ignore[assignment]
            self.q_a = nn.Linear(m.dim, latent.q_rank, bias=False)
            self.q_a_norm = nn.RMSNorm(latent.q_rank, eps=LATENT_EPS)
            self.q_b = nn.Linear(latent.q_rank, width, bias=False)
        self.kv_a = nn.Linear(m.dim, latent.kv_rank + m.rope_dim, bias=False)
        self.kv_a_norm = nn.RMSNorm(latent.kv_rank, eps=LATENT_EPS)
        self.kv_b = nn.Linear(latent.kv_rank, m.heads * (m.head_dim - m.rope_dim + latent.v_dim), bias=False)
        self.o = nn.Linear(m.heads * latent.v_dim, m.dim, bias=False)

    def project(self, x: Tensor, info: TokenInfo) -> tuple[Tensor, Tensor, Tensor]:
        x = self.enter(x)
        if self.q_a is not None and self.q_a_norm is not None and self.q_b is not None:
            q = self.q_b(self.q_a_norm(self.q_a(x)))
        else:
            assert self.q is not None
            q = self.q(x)
        latent, shared_key = self.kv_a(x).split([self.kv_rank, self.rope_dim], -1)
        q, shared_key = q.unflatten(-1, (-1, self.head_dim)), shared_key.unsqueeze(2)
        if info.rotation is not None:
            q, shared_key = rotate(q, info.rotation), rotate(shared_key, info.rotation)
        latent, shared_key = self.store(latent, shared_key)
        expanded = self.kv_b(self.kv_a_norm(latent)).unflatten(-1, (-1, self.head_dim - self.rope_dim + self.v_dim))
        k, v = expanded.split([self.head_dim - self.rope_dim, self.v_dim], -1)
        k = torch.cat((shared_key.expand(-1, -1, k.shape[2], -1), k), -1)
        v = F.pad(v, (0, self.head_dim - self.v_dim))  # kernels want one width
        return q if self.q_scale == 1.0 else q * self.q_scale, k, v

    def output(self, y: Tensor) -> Tensor:
        return self.o(y[..., : self.v_dim].flatten(2))
