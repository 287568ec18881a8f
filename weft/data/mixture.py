"""Several sources with weights: which source the k-th sample of a run comes from, and which of its samples it is.

Samples are dealt out in blocks of BLOCK. How many of a block come from each source follows from the weights, their
order inside the block from the seed, and a source's own samples are taken in its own shuffled order. So the k-th
sample is a function of the seed and k, and of the number of samples of the run where weights change towards its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.dataset import own_sources
from weft.data.formats.streamed_files import StreamedDataset
from weft.data.growing import Rounds
from weft.data.sample_order import Ints, SampleOrder, sample_in_epoch, shuffle
from weft.job.data import Data
from weft.job.errors import JobError

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


def describe_shares(data: Data, weights: Sequence[float], lengths: Sequence[int]) -> str:
    """The shares of a mixture's sources at the start of a run, as a sentence."""
    parts = [
        f"{each.name or each.source} {weight / sum(weights):.1%} ({length:,} samples"
        + (f", loss × {each.loss.weight:g})" if each.loss is not None and each.loss.weight != 1 else ")")
        for each, weight, length in zip(data.mixture, weights, lengths, strict=True)
    ]
    rule = "" if data.temperature is None else f", by samples^(1/{data.temperature:g})"
    return f"mixture: {', '.join(parts)}{rule}"


class MixedDataset:
    """Samples of several datasets; an index of one of them is offset by the lengths of those before it.

    Streamed ones have an order of their own. The rounds of a checkpoint are those of each of them.
    """

    def __init__(self, datasets: Sequence[Any], shares: SourceShares, order: SampleOrder, fingerprint: str):
        self._datasets, self._shares, self._order, self.fingerprint = tuple(datasets), shares, order, fingerprint
        self._train = np.cumsum(
            [0, *(d.index_limit if isinstance(d, StreamedDataset) else d.train_len for d in datasets)]
        )
        self._val = np.cumsum([0, *(d.val_len for d in datasets)])
        self.train_len, self.val_len = sum(d.train_len for d in datasets), int(self._val[-1])
        self._streamed = [d for d in datasets if isinstance(d, StreamedDataset)]
        self.rounds: Rounds = [d.rounds[0] for d in self._streamed]
        self.padding = getattr(datasets[0], "padding", None)
        self.takes_epoch, self.draws = (
            any(getattr(d, name, False) for d in datasets) for name in ("takes_epoch", "draws")
        )
        firsts = zip(self._train, datasets, strict=False)
        self.own_sources = {int(first) + i: own for first, d in firsts for i, own in own_sources(d).items()}
        self.summary = ""
        """The shares of the sources, for the log."""

    def follow(self, rounds: Rounds) -> None:
        """Use the counts of a checkpoint; a JobError if files of a streamed source were changed since."""
        if self._streamed and len(rounds) != len(self._streamed):
            raise JobError(
                f"data.mixture has {len(self._streamed)} streamed sources, and the checkpoint {len(rounds)}, so that "
                "its samples have other numbers; restore the mixture, or start a run with another name"
            )
        for dataset, found in zip(self._streamed, rounds, strict=False):
            dataset.follow([found])

    def train(self, index: int, epoch: int = 0) -> dict[str, np.ndarray]:
        which = self._which(self._train, index)
        return self._sample(which, sample_in_epoch(self._datasets[which], index - int(self._train[which]), epoch))

    def val(self, index: int) -> dict[str, np.ndarray]:
        which = self._which(self._val, index)
        return self._sample(which, self._datasets[which].val(index - int(self._val[which])))

    def _sample(self, which: int, sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return sample

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
                out[here[mine]] = self._train[source] + self._own_indices(source, seed, numbers[places[mine]])
        return out

    def _own_indices(self, source: int, seed: int, numbers: Ints) -> Ints:
        """The indices in a source of its samples with these numbers."""
        dataset = self._datasets[source]
        if isinstance(dataset, StreamedDataset):
            return dataset.sample_indices(seed + source, numbers)
        return self._order.indices(seed + source, numbers, dataset.train_len)


class TaskDataset(MixedDataset):
    """Samples of several tasks, each with the number of its task.

    With a sample of each task, as for modules of your own, tasks may have different inputs and targets: a target is
    named after its task, and what a task does not have is filled with zeros.
    """

    def __init__(
        self, datasets: Sequence[Any], shares: SourceShares, order: SampleOrder, fingerprint: str,
        names: Sequence[str], samples: Sequence[dict[str, np.ndarray]] = (),
    ) -> None:  # fmt: skip
        super().__init__(datasets, shares, order, fingerprint)
        self.val_ranges = tuple((int(a), int(b)) for a, b in pairwise(self._val) if b > a)
        """Held-out samples of each task that has some."""
        self._names, self._apart = tuple(names), bool(samples)
        self._blank: dict[str, np.ndarray] = {}
        for which, sample in enumerate(samples):
            self._add_blank(which, self._renamed(which, sample))

    def _add_blank(self, which: int, sample: dict[str, np.ndarray]) -> None:
        for key, value in sample.items():
            blank = self._blank.setdefault(key, np.zeros_like(value))
            if blank.ndim != value.ndim or blank.dtype.kind != value.dtype.kind:
                raise JobError(
                    f"data.mixture: {key} is {value.dtype} of shape {list(value.shape)} in task {self._names[which]}, "
                    f"and {blank.dtype} of shape {list(blank.shape)} in an earlier one; give it another name there"
                )
        inputs = [key for key in self._blank if key == "inputs" or key.startswith("inputs/")]
        if len({key[:8] == "inputs/#" or key == "inputs" for key in inputs}) > 1:
            raise JobError(
                f"data.mixture: task {self._names[which]} names its inputs, and another does not; yield dicts with "
                "the names of forward's parameters in both"
            )

    def _renamed(self, which: int, sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        own = f"targets/{self._names[which]}"
        return {
            own + key.removeprefix("targets") if key == "targets" or key.startswith("targets/") else key: value
            for key, value in sample.items()
        }

    def _sample(self, which: int, sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self._apart:
            sample = {**self._blank, **self._renamed(which, sample)}
        return {**sample, "task": np.asarray(which, dtype=np.int64)}
