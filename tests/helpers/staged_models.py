"""User modules for pipelines: plain nn.Modules without any reference to Weft."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.own_models import Block, Records


class Convolutions(nn.Sequential):
    """Nested lists, batch norms, in-place activations."""

    def __init__(self, width: int = 6, dropout: float = 0.0):
        layers: list[nn.Module] = []
        for inside in (3, width, width):
            layers += [nn.Conv2d(inside, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        super().__init__(
            nn.Sequential(*layers), nn.Dropout(dropout), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3)
        )


class Pair(nn.Module):
    """A block that takes and gives a tuple and a dict."""

    def __init__(self, dim: int):
        super().__init__()
        self.block = Block(dim, 2 * dim)

    def forward(self, both: tuple[Tensor, dict[str, Any]]) -> tuple[Tensor, dict[str, Any]]:
        x, notes = both
        y = self.block(x)
        return y, {"sum": notes["sum"] + y.mean(-1), "count": notes["count"] + 1, "kind": notes["kind"]}


class Crossing(nn.Module):
    """Two inputs, of which the last stage reads one again; values that skip stages; shapes; an optional input."""

    def __init__(self, dim: int = 8, layers: int = 4, random_skip: bool = False):
        super().__init__()
        self.words = nn.Embedding(16, dim)
        self.values = nn.Linear(4, dim)
        self.start = nn.Parameter(torch.ones(dim))
        self.blocks = nn.ModuleList(Pair(dim) for _ in range(layers))
        self.out = nn.Linear(2 * dim + 4, 3)
        self.random_skip = random_skip

    def forward(self, words: Tensor, values: Tensor, weight: Tensor | None = None) -> Tensor:
        first = self.words(words)  # [batch, seq, dim]
        x = first + self.values(values)[:, None] * self.start
        if weight is not None:
            x = x * weight
        batch, seq, dim = x.shape
        kept = F.dropout(x, 0.5, training=self.training and self.random_skip)
        both = (kept, {"sum": x.sum(-1), "count": 0, "kind": words})
        for block in self.blocks:
            both = block(both)
        y, notes = both
        pooled = y.view(batch, seq * dim).view(batch, seq, dim).mean(1) + notes["sum"].mean(1, keepdim=True)
        return self.out(torch.cat([pooled, first.mean(1), values], 1)) / notes["count"]


class Branching(Crossing):
    """Its path depends on values."""

    def forward(self, words: Tensor, values: Tensor, weight: Tensor | None = None) -> Tensor:
        if values.sum() > 0:
            values = -values
        return super().forward(words, values)


class LayerDrop(Crossing):
    def forward(self, words: Tensor, values: Tensor, weight: Tensor | None = None) -> Tensor:
        if random.random() < 2:
            values = -values
        return super().forward(words, values)


class Twice(nn.Module):
    """Calls one layer twice, far apart."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.first, self.inner, self.out = nn.Linear(4, dim), nn.Linear(dim, dim), nn.Linear(dim, 3)

    def forward(self, words: Tensor, values: Tensor) -> Tensor:
        x = self.first(values)
        y = self.inner(x)
        return self.out(self.inner(y.tanh()))


class TwoTowers(nn.Module):
    """Vectors of words and of values, and the factor on their similarities."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.text = nn.Sequential(nn.Embedding(16, dim), Block(dim, 16))
        self.image = nn.Sequential(nn.Linear(4, dim), Block(dim, 16))
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, words: Tensor, values: Tensor) -> dict[str, Tensor]:
        return {"text": self.text(words).mean(1), "image": self.image(values), "scale": self.scale.exp() * 5}


class Captions(Records):
    """Two inputs without a target."""

    def train(self, index: int) -> dict[str, object]:
        sample = super().train(index)
        return {"words": sample["words"], "values": sample["values"]}
