"""Embedding tables of a model: the ids of a batch become one vector a feature.

On one process without Weft's engine the tables are plain parameters. `parallelize` replaces them by a `TableEngine`,
which spreads them over the ranks (weft/extensions/recommenders/tables/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.errors import JobError


@dataclass(frozen=True)
class TableSpec:
    """What a model knows of a table."""

    name: str
    rows: int
    dim: int
    pooling: str
    features: tuple[str, ...]
    init: float
    tower: str = "user"

    @property
    def weight(self) -> str:
        """The name of its parameter in EmbeddingTables."""
        return f"{self.name}_weight"


@dataclass(frozen=True)
class Bags:
    """The ids of one feature: bag i has the ids of which `bag` is i, in order."""

    table: str
    ids: Tensor
    """[ids]"""
    bag: Tensor
    """[ids], rising."""
    count: int
    """Number of bags."""
    mean: bool


class TableEngine(Protocol):
    """Looks up pooled vectors in tables that are spread over ranks."""

    def lookup(self, features: Sequence[Bags]) -> list[Tensor]:
        """For each feature its pooled vectors, [bags, dim]."""
        ...


class EmbeddingTables(nn.Module):
    """Tables by name. Their parameters have no memory until they are loaded or spread."""

    rows_on_ranks = True
    """Its rows are spread over ranks in a way of their own (weft/parallel/spreaders.py)."""

    def __init__(self, tables: Sequence[Mapping[str, Any]]):
        super().__init__()
        self.specs = [TableSpec(**{**t, "features": tuple(t["features"])}) for t in tables]
        self.engine: TableEngine | None = None
        for spec in self.specs:
            self.register_parameter(
                spec.weight, nn.Parameter(torch.empty(spec.rows, spec.dim, device="meta"), requires_grad=True)
            )

    def forward(self, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The vectors of every feature: [batch, dim], or [batch, candidates, dim]."""
        shapes, bags = {}, []
        for spec in self.specs:
            for feature in spec.features:
                if feature not in samples:
                    raise JobError(
                        f"the samples have {', '.join(sorted(samples)) or 'no inputs'}, and model.tables looks up "
                        f"{feature!r}; add it to the samples, or set the table's features"
                    )
                made, shapes[feature] = to_bags(spec, samples[feature])
                bags.append(made)
        bags = without_missing(bags)
        found = self._lookup(bags) if self.engine is None else self.engine.lookup(bags)
        return {name: x.view(*shape, x.shape[-1]) for (name, shape), x in zip(shapes.items(), found, strict=True)}

    def _lookup(self, features: Sequence[Bags]) -> list[Tensor]:
        weights = {spec.name: getattr(self, spec.weight) for spec in self.specs}
        return [pool(weights[f.table], f.ids, f.bag, f.count, f.mean) for f in features]


def to_bags(spec: TableSpec, ids: Tensor) -> tuple[Bags, tuple[int, ...]]:
    """The bags of a feature's ids, with -1 for missing ones, and the shape of the bags: that of the ids without the
    length."""
    if ids.is_floating_point():
        raise JobError(f"the table {spec.name} takes integers, and the samples have {ids.dtype}; yield ids")
    grid = ids.unsqueeze(-1) if spec.pooling == "none" or ids.dim() == 1 else ids
    shape, length = grid.shape[:-1], grid.shape[-1]
    count = shape.numel()
    flat = grid.reshape(-1)
    bag = torch.arange(count, device=ids.device)
    bag = bag.repeat_interleave(length) if length != 1 else bag
    if not ids.is_cuda and flat.numel() and int(flat.max()) >= spec.rows:
        raise JobError(
            f"the table {spec.name} has rows={spec.rows}, and a sample has the id {int(flat.max())}; "
            f"rows={int(flat.max()) + 1} would work"
        )
    return Bags(spec.name, flat, bag, count, spec.pooling == "mean"), tuple(shape)


def without_missing(features: Sequence[Bags]) -> list[Bags]:
    """The features without ids of -1. One check for all of them: a GPU waits for it."""
    kept = [f.ids >= 0 for f in features]
    if bool(torch.cat(kept).all()):
        return list(features)
    return [replace(f, ids=f.ids[k], bag=f.bag[k]) for f, k in zip(features, kept, strict=True)]


def pool(weight: Tensor, ids: Tensor, bag: Tensor, count: int, mean: bool) -> Tensor:
    """The sum or mean of the rows of every bag, [count, dim]; that of an empty bag is zero."""
    sizes = bag_sizes(bag, count)
    weights = (1.0 / sizes.clamp(min=1).to(weight.dtype))[bag] if mean else None
    return F.embedding_bag(ids, weight, sizes.cumsum(0) - sizes, mode="sum", per_sample_weights=weights)


def bag_sizes(bag: Tensor, count: int) -> Tensor:
    """Ids in each bag."""
    return torch.zeros(count, dtype=torch.long, device=bag.device).index_add_(0, bag, torch.ones_like(bag))
