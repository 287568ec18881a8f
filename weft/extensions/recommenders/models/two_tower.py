"""Two towers: the vectors of a user and of an item, from tables and an MLP each, and their dot product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.extensions.recommenders.models.dlrm import broadcast_candidates, dense_input, mlp
from weft.extensions.recommenders.models.tables import EmbeddingTables


class TwoTower(nn.Module):
    """Scores of pairs of a user and an item, or of a user and each of several items. Dense features are the user's."""

    def __init__(
        self, tables: Sequence[Mapping[str, Any]], dim: int, dense_features: int = 0, bottom: Sequence[int] = ()
    ):
        super().__init__()
        self.tables = EmbeddingTables(tables)
        self.features = {
            tower: [f for spec in self.tables.specs if spec.tower == tower for f in spec.features]
            for tower in ("user", "item")
        }
        widths = {f: spec.dim for spec in self.tables.specs for f in spec.features}
        inside = {tower: sum(widths[f] for f in names) for tower, names in self.features.items()}
        self.user = mlp([inside["user"] + dense_features, *bottom, dim], last_relu=False)
        self.item = mlp([inside["item"], *bottom, dim], last_relu=False)
        self.bias = nn.Parameter(torch.zeros(1))
        self.dense_features = dense_features

    def forward(self, dense: Tensor | None = None, **ids: Tensor) -> Tensor:
        vectors = self.tables(ids)
        users = [vectors[f] for f in self.features["user"]]
        if self.dense_features:
            users.append(dense_input(dense, self.dense_features))
        user = self.user(torch.cat(broadcast_candidates(users), dim=-1))
        item = self.item(torch.cat(broadcast_candidates([vectors[f] for f in self.features["item"]]), dim=-1))
        user, item = broadcast_candidates([user, item])
        return (user * item).sum(-1) + self.bias
