"""Which sample comes when: the k-th sample of a run, epochs, other orders, and each replica's share of a batch.

The k-th sample is a pure function of the seed and k, in constant memory. Shares change which rank reads a sample, never
which samples a step has; the loss is a sum over valid targets, so any shares give the same step.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from weft.data.dataset import Dataset, Sample, own_sources
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.job.train import BatchRamp

_ROUNDS = 8
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]


@overload
def shuffle(seed: int, epoch: int, index: int, n: int) -> int: ...
@overload
def shuffle(seed: int, epoch: int, index: Ints, n: int) -> Ints: ...
def shuffle(seed: int, epoch: int, index: int | Ints, n: int) -> int | Ints:
    """Where `index` goes when range(n) is shuffled for this seed and epoch: a bijection of range(n).

    No table of n numbers is made, so a rank that joins at any step needs neither memory nor the steps before it.
    """
    _check_length(n)
    flat = _integers(index)
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= n):
        raise ValueError(f"an index of a shuffle of {n} must lie in range({n}), not {index!r}")
    keys = _round_keys(seed, epoch)[:, None]
    moved = _walk(flat.astype(np.uint64), np.broadcast_to(keys, (_ROUNDS, flat.size)), n).astype(np.int64)
    return moved.reshape(index.shape) if isinstance(index, np.ndarray) else int(moved[0])


@overload
def sample_index(seed: int, k: int, n: int, read: int | None = None) -> int: ...
@overload
def sample_index(seed: int, k: Ints, n: int, read: int | None = None) -> Ints: ...
def sample_index(seed: int, k: int | Ints, n: int, read: int | None = None) -> int | Ints:
    """The dataset index of the run's k-th sample when an epoch has n: every epoch is its own shuffle of range(n), of
    which the first `read` are read (default: all)."""
    read = n if read is None else read
    _check_length(n)
    flat = _integers(k)
    if flat.size and int(flat.min()) < 0:
        raise ValueError(f"samples are counted from 0, not {k!r}")
    epochs, which = np.unique(flat // read, return_inverse=True)
    table = np.stack([_round_keys(seed, int(e)) for e in epochs], axis=1) if epochs.size else _round_keys(0, 0)[:, None]
    moved = _walk((flat % read).astype(np.uint64), table[:, which.reshape(-1)], n).astype(np.int64)
    return moved.reshape(k.shape) if isinstance(k, np.ndarray) else int(moved[0])


def _check_length(n: int) -> None:
    if not 1 <= n < 1 << 62:
        raise ValueError(f"a shuffle needs between 1 and 2**62 samples, not {n}")


def _integers(value: int | Ints) -> Ints:
    return np.asarray(value).reshape(-1).astype(np.int64)


def _round_keys(seed: int, epoch: int) -> _Words:
    """Eight keys from a hash, so that neighbouring seeds and epochs share nothing, and a seed may be of any size."""
    digest = hashlib.blake2b(f"weft shuffle {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _walk(x: _Words, keys: _Words, n: int) -> _Words:
    """Cycle walking: a permutation of a power of four, applied until the value falls below n, permutes range(n).

    The power of four is less than four times n, so a value walks four steps on average at the most.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    x = _feistel(x, keys, half)
    outside = np.flatnonzero(x >= np.uint64(n))
    while outside.size:
        x[outside] = _feistel(x[outside], keys[:, outside], half)
        outside = outside[x[outside] >= np.uint64(n)]
    return x


def _feistel(x: _Words, keys: _Words, half: int) -> _Words:
    """A balanced Feistel network over 2 × half bits: a bijection whatever the round function is."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: _Words) -> _Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


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
            out[here] = source * self.block + self._shuffled(seed, epoch, source, places[here] % self.block, self.block)
        if rest and (~full).any():
            at = whole * self.block
            out[~full] = at + self._shuffled(seed, epoch, whole, places[~full] - at, rest)
        return out

    def _shuffled(self, seed: int, epoch: int, block: int, places: Ints, size: int) -> Ints:
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


def epoch_len(dataset: Dataset, global_batch: int, drop_last: bool) -> int:
    """Samples read in an epoch: all, or with drop_last those of whole batches."""
    if not drop_last:
        return dataset.train_len
    if dataset.train_len < global_batch:
        raise JobError(
            f"data.drop_last=true drops every sample: an epoch has {dataset.train_len}, and train.global_batch is "
            f"{global_batch}; write a smaller batch, or leave drop_last out"
        )
    return dataset.train_len // global_batch * global_batch


def read_sample(dataset: Dataset, number: int, index: int, in_epoch: int) -> Sample:
    """The training sample of an index, in the epoch of the run's sample `number`; an epoch has `in_epoch` samples."""
    return sample_in_epoch(dataset, index, number // in_epoch)


def sample_in_epoch(dataset: Dataset, index: int, epoch: int) -> Sample:
    """A training sample, which depends on the epoch too if it is augmented."""
    if getattr(dataset, "takes_epoch", False):
        return dataset.train(index, epoch)  # type: ignore[call-arg]
    return dataset.train(index)


@dataclass(frozen=True)
class BatchShares:
    """The sizes of the microbatches of every data-parallel rank, in order."""

    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def even(cls, global_batch: int, microbatch: int, dp_size: int) -> BatchShares:
        """Equal shares."""
        share = even_share(global_batch, microbatch, dp_size)
        sizes = tuple(min(microbatch, share - start) for start in range(0, share, microbatch))
        return cls((sizes,) * dp_size)

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return tuple(sum(sizes) for sizes in self.parts)

    def first(self, dp_rank: int) -> int:
        """Where in the global batch a rank's samples begin."""
        return sum(self.counts[:dp_rank])

    def slices(self, dp_rank: int) -> list[slice]:
        """A rank's microbatches, as parts of its share."""
        sizes = self.parts[dp_rank]
        return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def even_share(global_batch: int, microbatch: int, dp_size: int) -> int:
    if min(global_batch, microbatch, dp_size) < 1:
        raise ValueError(f"no share for {global_batch=} {microbatch=} {dp_size=}")
    if global_batch % dp_size:
        near = max(global_batch // dp_size, 1) * dp_size
        raise JobError(
            f"train.global_batch {global_batch} does not divide among {dp_size} data-parallel ranks; {near} would"
        )
    return global_batch // dp_size


def divide_samples(samples: int, seconds: Sequence[float], least: int, most: int) -> list[int]:
    """Samples of each rank such that the slowest finishes soonest.

    `seconds` is the time of one sample on each rank; every rank gets between `least` and `most`. Each sample goes to
    the rank that would finish it first, which is optimal for equal samples.
    """
    ranks = len(seconds)
    if not least * ranks <= samples <= most * ranks:
        raise ValueError(f"{samples} samples cannot be divided among {ranks} ranks with {least} to {most} each")
    counts = [least] * ranks
    ready = [((least + 1) * s, rank) for rank, s in enumerate(seconds) if least < most]
    heapq.heapify(ready)
    for _ in range(samples - least * ranks):
        _, rank = heapq.heappop(ready)
        counts[rank] += 1
        if counts[rank] < most:
            heapq.heappush(ready, ((counts[rank] + 1) * seconds[rank], rank))
    return counts


def split_evenly(count: int, parts: int) -> tuple[int, ...]:
    """A count split into parts of nearly the same size."""
    return tuple((i + 1) * count // parts - i * count // parts for i in range(parts))


@dataclass(frozen=True)
class Calendar:
    """The steps of a run and its epochs."""

    steps: int
    epoch_samples: int
    ramp: BatchRamp

    @classmethod
    def of(cls, job: Job, dataset: Dataset) -> Calendar:
        train = job.train
        return cls(train.steps, epoch_len(dataset, train.global_batch, job.data.drop_last), train.ramp)

    def epochs(self, step: int) -> float:
        """Passes over the training samples that the first `step` steps make."""
        return self.ramp.samples_before(step) / max(1, self.epoch_samples)

    def newest(self, every: int | str, step: int) -> int:
        """The last step up to `step` at which something is due; 0 if it has not been due yet."""
        return step if step >= self.steps and every != "never" else self._newest_recurrence(every, step)

    def due(self, every: int | str, step: int, before: int | None = None) -> bool:
        """Whether something is due in the steps (before, step]; `before` is the step before by default."""
        return self.newest(every, step) > (step - 1 if before is None else before)

    def recurs(self, every: int | str, step: int) -> bool:
        """Whether something is due at a step for another reason than that the run ends."""
        return 0 < self._newest_recurrence(every, step) == step

    def name(self, step: int) -> str:
        """The step in messages, with the number of the epoch that it ends."""
        return f"epoch {int(self.epochs(step))}, step {step}" if self.recurs("epoch", step) else f"step {step}"

    def _newest_recurrence(self, every: int | str, step: int) -> int:
        if every == "epoch":
            return self.ramp.steps_of(int(self.epochs(step)) * max(1, self.epoch_samples))
        return step // int(every) * int(every) if every and every != "never" else 0
