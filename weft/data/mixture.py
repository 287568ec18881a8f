"""Several sources with weights: which source the k-th sample of a run comes from, and which of its samples it is.

Samples are dealt out in blocks of BLOCK. How many of a block come from each source follows from the weights, their
order inside the block from the seed, and a source's own samples are taken in its own shuffled order. So the k-th
sample is a function of the seed and k, and of the number of samples of the run where weights change towards its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.order import SampleOrder
from weft.data.sampler import Ints, shuffle

BLOCK = 1024
"""Samples of a block, in which the shares are those of the weights up to one sample of each source."""

Counts = NDArray[np.int64]


class SourceShares:
    """How many samples of the first blocks come from each source.

    Weights are `start` until sample `first`, then change linearly to `end` at sample `last`, and stay. Shares follow
    the weights in the middle of a block; what rounding leaves over goes to the source that is furthest behind.
    """

    def __init__(self, start: Sequence[float], end: Sequence[float], first: int, last: int):
        self.start, self.end = (np.asarray(w, dtype=np.float64) / sum(w) for w in (start, end))
        self.first, self.last = first // BLOCK, max(-(-last // BLOCK), first // BLOCK)
        """Blocks between which the weights change."""
        before = self._constant(self.start, self.first)
        self._changing = np.zeros((self.last - self.first + 1, self.start.size), dtype=np.int64)
        """Samples before each block while the weights change."""
        self._changing[0] = done = before
        due = before.astype(np.float64)
        for i in range(self.last - self.first):
            part = (i + 0.5) / (self.last - self.first)
            due = due + BLOCK * ((1 - part) * self.start + part * self.end)
            done = done + _rounded(np.maximum(due - done, 0.0))
            self._changing[i + 1] = done

    def before(self, block: int) -> Counts:
        """Samples of each source before a block."""
        if block <= self.first:
            return self._constant(self.start, block)
        if block <= self.last:
            return self._changing[block - self.first]
        return self._changing[-1] + self._constant(self.end, block - self.last)

    @staticmethod
    def _constant(weights: NDArray[np.float64], blocks: int) -> Counts:
        """The same for constant weights: all but the largest are rounded down, and the largest gets the rest."""
        found = np.floor(weights * (blocks * BLOCK) + 1e-9).astype(np.int64)
        top = int(weights.argmax())
        found[top] += blocks * BLOCK - found.sum()
        return found


def _rounded(due: NDArray[np.float64]) -> Counts:
    """Whole numbers close to `due` that sum to BLOCK."""
    scaled = due * (BLOCK / due.sum())
    found = np.floor(scaled).astype(np.int64)
    behind = np.argsort(-(scaled - found), kind="stable")
    found[behind[: BLOCK - int(found.sum())]] += 1
    return found


class MixedDataset:
    """Samples of several datasets; an index of one of them is offset by the lengths of those before it."""

    def __init__(self, datasets: Sequence[Any], shares: SourceShares, order: SampleOrder, fingerprint: str):
        self._datasets, self._shares, self._order, self.fingerprint = tuple(datasets), shares, order, fingerprint
        self._train = np.cumsum([0, *(d.train_len for d in datasets)])
        self._val = np.cumsum([0, *(d.val_len for d in datasets)])
        self.train_len, self.val_len = int(self._train[-1]), int(self._val[-1])

    def train(self, index: int) -> dict[str, np.ndarray]:
        which = self._which(self._train, index)
        found: dict[str, np.ndarray] = self._datasets[which].train(index - int(self._train[which]))
        return found

    def val(self, index: int) -> dict[str, np.ndarray]:
        which = self._which(self._val, index)
        found: dict[str, np.ndarray] = self._datasets[which].val(index - int(self._val[which]))
        return found

    @staticmethod
    def _which(offsets: Ints, index: int) -> int:
        if not 0 <= index < offsets[-1]:
            raise IndexError(f"sample {index} is not in range({offsets[-1]})")
        return int(np.searchsorted(offsets, index, side="right")) - 1

    def sample_indices(self, seed: int, ids: Ints) -> Ints:
        """The indices of the run's samples with these numbers."""
        out = np.empty(ids.size, dtype=np.int64)
        for block in np.unique(ids // BLOCK):
            here = np.flatnonzero(ids // BLOCK == block)
            before, after = self._shares.before(int(block)), self._shares.before(int(block) + 1)
            sources = np.repeat(np.arange(len(self._datasets)), after - before)
            numbers = np.concatenate([np.arange(a, b) for a, b in zip(before, after, strict=True)])
            places = shuffle(seed, int(block), ids[here] % BLOCK, BLOCK)
            for source in np.unique(sources[places]):
                mine = sources[places] == source
                own = self._order.indices(seed + int(source), numbers[places[mine]], self._datasets[source].train_len)
                out[here[mine]] = self._train[source] + own
        return out
