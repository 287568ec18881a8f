"""The weights of a published checkpoint, as the family of its model reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from weft.job.import_by_name import find_object
from weft.job.interchange import implementation_of
from weft.job.schema import Model


class PublishedWeights(Protocol):
    """The weights of a checkpoint, under the names of the model's parameters."""

    shapes: dict[str, tuple[int, ...]]
    """Of every parameter and buffer."""
    buffers: Collection[str]
    """Those of them that are buffers."""

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Read this rank's shards of parameters and buffers in place."""

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each parameter in the files."""

    def file_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor of the files, by its name there."""

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """One whole parameter."""


def open_published(name: str, model: Model) -> PublishedWeights:
    """The weights of a checkpoint: a folder or a name in the hub cache."""
    weights: PublishedWeights = find_object(implementation_of(model.family).weights, "model.pretrained")(name, model)
    return weights
