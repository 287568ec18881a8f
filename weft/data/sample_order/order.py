"""The order in which the samples of a dataset are read: shuffled one by one, in blocks, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.data.dataset import own_sources
from weft.data.sample_order.sampler import Ints, sample_index, shuffle


@dataclass(frozen=True)
class SampleOrder:
    """`samples` shuffles an epoch's samples one by one. `blocks` shuffles blocks of neighbours and the samples inside
    each, so that a disk is read in long pieces. `none` reads them in order."""

    kind: str = "samples"
    block: int = 1024

    def indices(self, seed: int, ids: Ints, length: int) -> Ints:
        """The indices of the samples with these numbers in a dataset of `length`: an epoch has each of them once."""
        if self.kind == "samples":
            return sample_index(seed, ids, length)
        if self.kind == "none":
            return ids % length
        out = np.empty(ids.size, dtype=np.int64)
        for epoch in np.unique(ids // length):
            here = np.flatnonzero(ids // length == epoch)
            out[here] = self._in_blocks(seed, int(epoch), ids[here] % length, length)
        return out

    def _in_blocks(self, seed: int, epoch: int, places: Ints, length: int) -> Ints:
        whole, rest = divmod(length, self.block)
        out = places.copy()  # the last samples, which fill no block, stay at the end, in an order of their own
        full = places < whole * self.block
        for block in np.unique(places[full] // self.block):
            here = full & (places // self.block == block)
            source = shuffle(seed, epoch, int(block), whole)
            out[here] = source * self.block + self._inside(seed, epoch, source, places[here] % self.block, self.block)
        if rest and (~full).any():
            at = whole * self.block
            out[~full] = at + self._inside(seed, epoch, whole, places[~full] - at, rest)
        return out

    def _inside(self, seed: int, epoch: int, block: int, places: Ints, size: int) -> Ints:
        return shuffle((seed << 1) + 1, (epoch << 40) + block, places, size)


class OrderedDataset:
    """A dataset whose samples are read in another order than shuffled one by one."""

    def __init__(self, inner: Any, order: SampleOrder):
        self._inner, self._order = inner, order
        self.train_len, self.val_len = inner.train_len, inner.val_len
        self.train, self.val = inner.train, inner.val
        self.fingerprint = str(getattr(inner, "fingerprint", ""))
        self.takes_epoch, self.decodes, self.draws = (
            bool(getattr(inner, name, False)) for name in ("takes_epoch", "decodes", "draws")
        )
        self.own_sources = own_sources(inner)
        self.padding = getattr(inner, "padding", None)

    def sample_indices(self, seed: int, ids: Ints) -> Ints:
        """The indices of the run's samples with these numbers."""
        return self._order.indices(seed, ids, self.train_len)


def indices_of(dataset: Any, seed: int, ids: Ints, in_epoch: int | None = None) -> Ints:
    """The indices of a run's samples in a dataset: in its own order if it has one, else shuffled one by one. An epoch
    has `in_epoch` ids, by default all samples; a dataset with its own order has epochs of its own."""
    own = getattr(dataset, "sample_indices", None)
    found: Ints = sample_index(seed, ids, dataset.train_len, in_epoch) if own is None else own(seed, ids)
    return found
