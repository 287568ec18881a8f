"""The interface of datasets."""

from __future__ import annotations

from typing import Protocol

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


def fingerprint_of(dataset: Dataset) -> str:
    """A checksum of a dataset's contents; empty where they are generated or a user's own."""
    return str(getattr(dataset, "fingerprint", ""))
