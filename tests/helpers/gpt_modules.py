"""Language models as common repositories write them: configs, asserts on sizes, fused attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class GptConfig:
    width: int = 16
    heads: int = 2
    layers: int = 2
    block_size: int = 8
    vocab: int = 256
    dropout: float = 0.0


class TanhGelu(nn.Module):
    """An activation with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class FusedAttention(nn.Module):
    """One layer for queries, keys and values, and a mask that is cut to the length of the inputs."""

    def __init__(self, config: GptConfig):
        super().__init__()
        self.c_attn = nn.Linear(config.width, 3 * config.width)
        self.c_proj = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))
        self.heads, self.width = config.heads, config.width

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = self.dropout(F.softmax(scores, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class FusedBlock(nn.Module):
    """The MLP is a ModuleDict that a function of the block calls."""

    def __init__(self, config: GptConfig):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(2))
        self.attn = FusedAttention(config)
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(config.width, 32), "act": TanhGelu(), "down": nn.Linear(32, config.width)}
        )
        m = self.mlp
        self.apply_mlp = lambda x: m["down"](m["act"](m["up"](x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norms[0](x))
        return x + self.apply_mlp(self.norms[1](x))


class FusedGpt(nn.Module):
    """Its constructor takes a config, its forward asserts a length, and its embedding is tied to the head."""

    def __init__(self, config: GptConfig):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab, config.width),
                "wpe": nn.Embedding(config.block_size, config.width),
                "h": nn.ModuleList(FusedBlock(config) for _ in range(config.layers)),
            }
        )
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.transformer["wte"].weight = self.head.weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        _, t = tokens.size()
        assert t <= self.config.block_size, f"{t} tokens, and only {self.config.block_size} positions"
        positions = torch.arange(0, t, device=tokens.device) + torch.zeros(t, t, dtype=torch.int64)[0]
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:  # type: ignore[attr-defined]
            x = block(x)
        return self.head(x)


class Unannotated(FusedGpt):
    def __init__(self, config):  # type: ignore[no-untyped-def]
        super().__init__(config)


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotary positions of x [batch, seq, heads, dim]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    assert freqs.shape == (pairs.shape[1], pairs.shape[-1])
    shape = [n if i in (1, pairs.ndim - 1) else 1 for i, n in enumerate(pairs.shape)]
    return torch.view_as_real(pairs * freqs.view(*shape)).flatten(3).type_as(x)


class SplitAttention(nn.Module):
    """A layer each for queries, keys and values; two query heads read one of keys and values."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, width // 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.heads, self.head_dim)
        k, v = (layer(x).view(b, t, self.heads // 2, self.head_dim) for layer in (self.wk, self.wv))
        q, k = rotated(q, freqs), rotated(k, freqs)
        k, v = (
            y[:, :, :, None, :].expand(b, t, self.heads // 2, 2, self.head_dim).reshape(b, t, self.heads, self.head_dim)
            for y in (k, v)
        )
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))


class SplitBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), SplitAttention(width, heads)
        self.w1, self.w2, self.w3 = nn.Linear(width, 32), nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), freqs)
        return x + self.w2(F.silu(self.w1(x)) * self.w3(x))


class RotaryGpt(nn.Module):
    """Moves a table of its own to the device of its inputs in each forward."""

    def __init__(self, width: int = 16, heads: int = 4):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.layers = nn.ModuleList(SplitBlock(width, heads) for _ in range(2))
        angles = torch.outer(torch.arange(16).float(), 100.0 ** -torch.arange(0, 1, 2 * heads / width))
        self.freqs = torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: Tensor) -> Tensor:
        _, t = tokens.shape
        x = self.embed(tokens)
        self.freqs = self.freqs.to(x.device)
        freqs = self.freqs[0:t]
        for layer in self.layers:
            x = layer(x, freqs)
        return self.head(x).float()


class TimeMajor(nn.Module):
    """torch's encoder over [time, batch], with a mask that is made in forward once."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mask: Tensor | None = None

    def forward(self, src: Tensor) -> Tensor:
        if self.mask is None or self.mask.size(0) != len(src):
            n = len(src)
            self.mask = torch.triu(torch.full((n, n), float("-inf")), diagonal=1) + torch.zeros(n, n)
        return self.head(self.encoder(self.embed(src), mask=self.mask))


class Double(TimeMajor):
    def __init__(self) -> None:
        super().__init__()
        self.double()


class BatchFirst(nn.Module):
    """TimeMajor over [batch, time]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TimeMajor()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens.transpose(0, 1)).transpose(0, 1)


class Stateful(nn.Module):
    """Layers around what a subclass does between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("peak", torch.zeros(()))
        self.mean: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = self.between(x)
        return self.layers[2](self.layers[1](x))

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class KeepsPeak(Stateful):
    """A buffer is assigned its maximum with the inputs."""

    def between(self, x: Tensor) -> Tensor:
        self.peak = torch.maximum(self.peak, x.detach().abs().max())
        return x / (1 + self.peak)


class KeepsMean(Stateful):
    """A mean over calls that begins with the first."""

    def between(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean() if self.mean is None else 0.9 * self.mean + x.detach().mean()
        return x - self.mean


class Counts(Stateful):
    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class AddsAll(Stateful):
    """A loop over the samples of a batch."""

    def between(self, x: Tensor) -> Tensor:
        return x + sum(x[i].mean() for i in range(len(x)))
