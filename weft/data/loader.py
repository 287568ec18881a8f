"""Each rank's share of every step, read ahead in a background thread."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

import numpy as np
import torch

from weft.data.dataset import Dataset, Sample
from weft.data.sample_order import (
    BatchShares,
    Ints,
    epoch_len,
    even_share,
    indices_of,
    read_sample,
    split_evenly,
)
from weft.data.sample_workers import SampleWorkers
from weft.data.task_records import Padding
from weft.job.errors import JobError
from weft.job.train import BatchRamp

Batch = dict[str, torch.Tensor]

_CLOSE_SECONDS = 10.0


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device, asynchronously from pinned memory."""
    return {k: v.to(device, non_blocking=True) for k, v in batch.items()}


class _Step(NamedTuple):
    number: int
    shares: BatchShares
    ids: Ints
    indices: Ints
    batches: list[Batch]


class Loader:
    """Endless steps of training data, from start_step on; each is the list of this rank's microbatches.

    Step s has the G samples from k = s × G on, and rank r of R the r-th of R shares of them, which are equal unless
    `shares` is set. Nothing depends on what was read before. A `ramp` gives early steps fewer samples; with
    `fixed_parts` they have as many microbatches as the others. `start_sample` is the k of start_step if earlier steps
    had another G. `pin` puts batches into pinned memory. With `drop_last` an epoch ends with its last whole batch.
    `workers` processes read the samples, if any. Of a growing dataset, `grow` is called when the next step has not
    enough samples: it adds new ones, or returns false, which ends the iteration.
    """

    def __init__(
        self, dataset: Dataset, *, seed: int, global_batch: int, microbatch: int, dp_rank: int, dp_size: int,
        prefetch: int = 2, start_step: int = 0, start_sample: int | None = None, record: Path | None = None,
        pin: bool = False, shares: BatchShares | None = None, ramp: BatchRamp | None = None, fixed_parts: bool = False,
        drop_last: bool = False, workers: int = 0, grow: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        self._dataset, self._seed, self._dp_rank = dataset, seed, dp_rank
        self._ramp = ramp or BatchRamp(global_batch)
        self._microbatch, self._dp_size = microbatch, dp_size
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"no share for {dp_rank=} {dp_size=}")
        self.shares = shares or BatchShares.even(global_batch, microbatch, dp_size)
        """BatchShares of full batches from the next step on; all ranks change it between the same steps."""
        self._epoch_len = epoch_len(dataset, global_batch, drop_last)
        self._parts = len(self.shares.parts[0]) if fixed_parts else None
        self.waited = 0.0
        """Seconds spent waiting for data."""
        self._offset = 0 if start_sample is None else start_sample - self._ramp.samples_before(start_step)
        alone = getattr(dataset, "draws", False) and not workers  # no thread may draw beside the model
        self._prefetch, self._pin = 0 if alone else prefetch, pin
        self._worker_count = workers
        self._grow = grow
        self._workers: SampleWorkers | None = None
        self._next_read = start_step
        self._record_path = record
        self._record: BinaryIO | None = None
        self._unwritten = b""
        self._ready: deque[_Step] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        began = time.perf_counter()
        if self._grow is not None:
            self._add_samples(self._grow)
        if self._worker_count and self._workers is None and not self._closed:
            self._workers = SampleWorkers(self._dataset, self._worker_count)
        step = self._take() if self._prefetch else self._read_now()
        if step.shares != self._shares(step.number):  # it was read before the shares changed
            step = self._read(step.number)
        self.waited += time.perf_counter() - began
        if self._record_path is not None:
            self._write_record(self._record_path, step)
        return step.batches

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead and close the record; iterating afterwards ends at once."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            # the thread is a daemon, so a dataset that hangs in a read does not hang the end of the run
            self._thread.join(_CLOSE_SECONDS)
        if self._workers is not None:
            self._workers.close()
        if self._record is not None:
            self._flush_record()
            self._record.close()
            self._record = None

    def _add_samples(self, grow: Callable[[], bool]) -> None:
        """Make a growing dataset have enough samples for the next step, or end the iteration."""
        while True:
            with self._changed:
                if self._closed or self._ready or not self._exhausted():
                    return
            if self._thread is not None:
                self._thread.join()  # it ends where the samples do
                self._thread = None
            if not grow():
                raise StopIteration
            if self._workers is not None:  # they have the dataset as it was
                self._workers.close()
                self._workers = None

    def _exhausted(self) -> bool:
        """Whether a growing dataset has not enough samples for the next step to be read."""
        available = getattr(self._dataset, "available", None)
        if available is None:
            return False
        return bool(self._ramp.samples_before(self._next_read + 1) + self._offset > available)

    def _read_now(self) -> _Step:
        if self._closed:
            raise StopIteration
        step = self._read(self._next_read)
        self._next_read += 1
        return step

    def _take(self) -> _Step:
        with self._changed:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._read_ahead, name="weft-loader", daemon=True)
                thread.start()  # which fails where a limit of the system is reached
                self._thread = thread
            self._changed.wait_for(lambda: self._ready or self._error is not None or self._closed)
            if self._closed:
                raise StopIteration
            if not self._ready:
                assert self._error is not None
                raise self._error
            step = self._ready.popleft()
            self._changed.notify_all()
            return step

    def _read_ahead(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._prefetch or self._closed)
                    if self._closed or (self._grow is not None and self._exhausted()):
                        return
                step = self._read(self._next_read)
                with self._changed:
                    self._next_read += 1
                    self._ready.append(step)
                    self._changed.notify_all()
        except BaseException as error:  # raised again in the consumer
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _shares(self, step: int) -> BatchShares:
        batch = self._ramp.batch(step)
        if batch == self._ramp.global_batch:
            return self.shares
        share = even_share(batch, self._microbatch, self._dp_size)
        return BatchShares((split_evenly(share, self._parts or -(-share // self._microbatch)),) * self._dp_size)

    def _read(self, step: int) -> _Step:
        shares, first = self._shares(step), self._ramp.samples_before(step) + self._offset
        ids, indices = _numbers(self._dataset, self._seed, first, shares, self._dp_rank, self._epoch_len)
        parts = shares.slices(self._dp_rank)
        if self._workers is None:
            batches = read_samples(self._dataset, ids, indices, parts, self._epoch_len)
        elif found := self._workers.read(ids, indices, parts, self._epoch_len, self._pin):
            batches = [{"ids": torch.from_numpy(ids[part].copy()), **b} for part, b in zip(parts, found, strict=True)]
        else:
            apart = self._workers.read_apart(ids, indices, parts, self._epoch_len)
            batches = [_stack(apart[part], ids[part], padding_of(self._dataset)) for part in parts]
        if self._pin:
            batches = [{key: value.pin_memory() for key, value in batch.items()} for batch in batches]
        return _Step(step, shares, ids, indices, batches)

    def _write_record(self, path: Path, step: _Step) -> None:
        line = {"step": step.number + 1, "ids": step.ids.tolist(), "indices": step.indices.tolist()}
        self._unwritten += json.dumps(line).encode() + b"\n"
        with contextlib.suppress(OSError):  # a full disk does not end the run; lines are kept for later
            if self._record is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._record = path.open("ab", buffering=0)
            self._flush_record()

    def _flush_record(self) -> None:
        assert self._record is not None
        with contextlib.suppress(OSError):
            # unbuffered and in one write, so that a killed run leaves whole lines
            done = self._record.write(self._unwritten)
            self._unwritten = self._unwritten[done:]


def read_samples(dataset: Dataset, ids: Ints, indices: Ints, parts: list[slice], in_epoch: int) -> list[Batch]:
    """Training samples with these ids, in microbatches. An epoch has `in_epoch` ids."""
    samples = [read_sample(dataset, int(k), int(i), in_epoch) for k, i in zip(ids, indices, strict=True)]
    return [_stack(samples[part], ids[part], padding_of(dataset)) for part in parts]


def _numbers(
    dataset: Dataset, seed: int, first: int, shares: BatchShares, rank: int, in_epoch: int
) -> tuple[Ints, Ints]:
    """Ids and dataset indices of a rank's share of the step whose first sample is the `first` of the run."""
    first += shares.first(rank)
    ids = np.arange(first, first + shares.counts[rank], dtype=np.int64)
    return ids, indices_of(dataset, seed, ids, in_epoch)


def read_share(
    dataset: Dataset, *, seed: int, step: int, global_batch: int, microbatch: int, dp_rank: int, dp_size: int,
    offset: int = 0,
) -> list[Batch]:  # fmt: skip
    """One of the equal shares of a step, in microbatches: what a Loader gives, without one. `offset` is the number of
    samples read by earlier steps of other sizes, beyond what steps of this size would have read."""
    shares = BatchShares.even(global_batch, microbatch, dp_size)
    first = offset + step * global_batch
    ids, indices = _numbers(dataset, seed, first, shares, dp_rank, dataset.train_len)
    return read_samples(dataset, ids, indices, shares.slices(dp_rank), dataset.train_len)


def val_batches(
    dataset: Dataset, *, global_batch: int, microbatch: int, dp_rank: int, dp_size: int, limit: int
) -> Iterator[list[Batch]]:
    """The held-out samples in their fixed order, at most `limit` global batches of them, or so many of each task.

    The last global batch is filled up with masked samples (id -1, valid false), so that every rank
    takes part in every collective.
    """
    shares = BatchShares.even(global_batch, microbatch, dp_size)
    share = shares.counts[dp_rank]
    for start, stop in getattr(dataset, "val_ranges", ((0, dataset.val_len),)):
        for first in range(start, min(stop, start + limit * global_batch), global_batch):
            ids = first + dp_rank * share + np.arange(share, dtype=np.int64)
            filler = _void(dataset.val(stop - 1)) if ids[-1] >= stop else {}
            samples = [dataset.val(int(i)) if i < stop else filler for i in ids]
            ids = np.where(ids < stop, ids, -1)
            yield [_stack(samples[part], ids[part], padding_of(dataset)) for part in shares.slices(dp_rank)]


def _void(sample: Sample) -> Sample:
    return {**sample, "valid": np.zeros_like(sample["valid"])}


def padding_of(dataset: Dataset) -> Padding | None:
    """How the samples of a dataset are padded, if they have different lengths."""
    found: Padding | None = getattr(dataset, "padding", None)
    return found


def padded_ids(key: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Integer inputs that differ in their last dim, such as the ids of a feature, filled up with -1."""
    lengths = {a.shape[-1] if a.ndim else -1 for a in arrays}
    if len(lengths) == 1 or -1 in lengths or not key.startswith("inputs/"):
        return arrays
    if not all(np.issubdtype(a.dtype, np.integer) for a in arrays):
        return arrays
    longest = max(lengths)
    return [np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, longest - a.shape[-1])], constant_values=-1) for a in arrays]


def _stack(samples: Sequence[Sample], ids: Ints, padding: Padding | None = None) -> Batch:
    """One microbatch: each array of the samples with a batch dim in front, and the samples' numbers."""
    batch: Batch = {"ids": torch.from_numpy(ids.copy())}
    keys = samples[0].keys()
    for i, sample in zip(ids, samples, strict=True):
        if sample.keys() != keys:
            raise JobError(f"samples {ids[0]} and {i} of a batch differ: {sorted(keys)} and {sorted(sample)}")
    for key in keys:
        arrays = [np.asarray(sample[key]) for sample in samples]
        arrays = padded_ids(key, arrays) if padding is None else padding.pad(key, arrays)
        for i, array in zip(ids, arrays, strict=True):
            if array.shape != arrays[0].shape:
                raise JobError(
                    f"samples {ids[0]} and {i} of a batch have {key} of different shapes: "
                    f"{list(arrays[0].shape)} and {list(array.shape)}; pad them in your dataset, or give images one "
                    "size with data.images.size"
                )
        batch[key] = torch.from_numpy(np.stack(arrays))
    return batch
