"""The interface of datasets."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

Sample = dict[str, np.ndarray]
"""inputs, targets and valid (and docs and positions when data.mask_documents), each without a batch dim."""


class Dataset(Protocol):
    """Samples by number; reading one twice gives the same arrays."""

    train_len: int
    """Distinct training samples in an epoch, at least 1."""
    val_len: int
    """Held-out samples, may be 0."""

    def train(self, index: int) -> Sample: ...

    def val(self, index: int) -> Sample: ...


class OwnSource(NamedTuple):
    """A user's dataset."""

    name: str
    varies: bool
    """Whether a sample differs when it is read again, as with a generator of the dataset's own."""


DRAW_FROM = "draw random numbers from the global generators of torch, NumPy or Python, or from (index, epoch)"
"""What to do about samples that differ."""


def fingerprint_of(dataset: Dataset) -> str:
    """A checksum of a dataset's contents; empty where they are generated or a user's own."""
    return str(getattr(dataset, "fingerprint", ""))


def own_sources(dataset: object) -> dict[int, OwnSource]:
    """A user's datasets in a dataset, by the indices of their first training samples."""
    return dict(getattr(dataset, "own_sources", {}))
