"""DLRM (Naumov et al., 2019): embedding tables and a bottom MLP, their dot products, and a top MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from weft.extensions.recommenders.models.tables import EmbeddingTables
from weft.job.errors import JobError


def mlp(widths: Sequence[int], last_relu: bool) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for i, (inside, outside) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(inside, outside))
        if last_relu or i < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def broadcast_candidates(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Vectors of one shape: where some features have several candidates a sample, the others are repeated for each."""
    widest = max(vectors, key=lambda x: x.dim())
    return [x if x.dim() == widest.dim() else x.unsqueeze(1).expand(*widest.shape[:-1], x.shape[-1]) for x in vectors]


def dense_input(dense: Tensor | None, count: int) -> Tensor:
    """The dense features of a batch, [batch, count]."""
    if dense is None or dense.shape[-1] != count:
        given = "no key dense" if dense is None else f"{dense.shape[-1]} numbers in dense"
        raise JobError(f"model.dense_features={count}, and the samples have {given}; yield dense of shape [{count}]")
    return dense.float()


class DLRM(nn.Module):
    """Scores of samples, or of each candidate of a sample."""

    pairs: Tensor

    def __init__(
        self, tables: Sequence[Mapping[str, Any]], dim: int, dense_features: int = 0, bottom: Sequence[int] = (),
        top: Sequence[int] = (),
    ):  # fmt: skip
        super().__init__()
        self.tables, self.dense_features = EmbeddingTables(tables), dense_features
        self.bottom = mlp([dense_features, *bottom, dim], last_relu=True) if dense_features else None
        vectors = sum(len(spec.features) for spec in self.tables.specs) + (self.bottom is not None)
        pairs = vectors * (vectors - 1) // 2
        inside = pairs + (dim if self.bottom is not None else vectors * dim)
        self.top = mlp([inside, *top, 1], last_relu=False)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, dense: Tensor | None = None, **ids: Tensor) -> Tensor:
        vectors = list(self.tables(ids).values())
        if self.bottom is not None:
            vectors.append(self.bottom(dense_input(dense, self.dense_features)))
        x = torch.stack(broadcast_candidates(vectors), dim=-2)  # [batch, (candidates,) vectors, dim]
        products = (x @ x.transpose(-1, -2))[..., self.pairs[0], self.pairs[1]]
        rest = x[..., -1, :] if self.bottom is not None else x.flatten(-2)
        out: Tensor = self.top(torch.cat([rest, products.to(rest.dtype)], dim=-1))
        return out.squeeze(-1).clone()  # FSDP2 warns of outputs that are views
