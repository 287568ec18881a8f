"""Processes that read, decode and augment samples beside a rank."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing as mp
import multiprocessing.connection as connections
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.data.dataset import Dataset
from weft.data.file_positions import read_positions, reopen
from weft.data.sample_order import Ints, read_sample

CHUNK_SAMPLES = 16
"""Samples that a worker reads for one message."""
SLOT_MARGIN = 1.25
"""Shared memory of a chunk, relative to chunks of the dataset's first sample."""
MAX_AUTO_WORKERS = 16
PARENT_CHECK_S = 2.0

Arrays = dict[str, np.ndarray]


class SampleChunk(NamedTuple):
    """Samples of one microbatch that one worker reads."""

    part: int
    start: int
    ids: Ints
    indices: Ints


def auto_workers(device: torch.device, local_ranks: int, dataset: Dataset) -> int:
    """Workers for data.workers=auto: the cores of a GPU rank but one, for datasets that decode or transform images; one
    on a CPU for those whose samples use the global random generators, which the model may use too."""
    draws = getattr(dataset, "draws", False)
    if device.type != "cuda" or not (draws or getattr(dataset, "decodes", False)):
        return int(draws)
    return max(int(draws), min(MAX_AUTO_WORKERS, len(os.sched_getaffinity(0)) // max(1, local_ranks) - 1))


class SampleWorkers:
    """Forked processes that read chunks of samples into memory they share with this one.

    Each has two slots, so that it reads one chunk while the other is copied. A chunk that does not fit into its slot
    comes through the pipe.
    """

    def __init__(self, dataset: Dataset, count: int) -> None:
        first = dataset.train(0)
        self._slot = int(SLOT_MARGIN * CHUNK_SAMPLES * sum(np.asarray(v).nbytes for v in first.values())) + 4096
        self._memory = mmap.mmap(-1, 2 * count * self._slot)
        context, files = mp.get_context("fork"), read_positions()
        self._pipes: list[connections.Connection[Any, Any]] = []
        self._processes = []
        for number in range(count):
            ours, theirs = context.Pipe()
            slots = [memoryview(self._memory)[(2 * number + i) * self._slot :][: self._slot] for i in range(2)]
            process = context.Process(target=_work, args=(dataset, theirs, slots, os.getpid(), files), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def read(self, ids: Ints, indices: Ints, parts: list[slice], in_epoch: int, pin: bool) -> list[Any] | None:
        """Samples in microbatches, as a dict of tensors each; None if their shapes differ."""
        out: list[Any] = [{} for _ in parts]
        regular = True
        for chunk, arrays in self._chunks(_cut(ids, indices, parts), in_epoch):
            size = parts[chunk.part].stop - parts[chunk.part].start
            held = out[chunk.part]
            if arrays is None or (held and held.keys() != arrays.keys()):
                regular = False
                continue
            for key, array in arrays.items():
                if key not in held:
                    dtype = torch.from_numpy(array[:0]).dtype
                    held[key] = torch.empty((size, *array.shape[1:]), dtype=dtype, pin_memory=pin)
                if held[key].shape[1:] != array.shape[1:]:
                    regular = False
                else:
                    held[key][chunk.start : chunk.start + len(array)] = torch.from_numpy(array)
        return out if regular else None

    def read_apart(self, ids: Ints, indices: Ints, parts: list[slice], in_epoch: int) -> list[Arrays]:
        """Samples one by one, through the pipes: they may have different shapes."""
        out: list[Arrays] = [{}] * len(ids)
        for chunk, samples in self._chunks(_cut(ids, indices, parts), in_epoch, apart=True):
            first = parts[chunk.part].start + chunk.start
            out[first : first + len(chunk.ids)] = samples
        return out

    def _chunks(
        self, chunks: list[SampleChunk], in_epoch: int, apart: bool = False
    ) -> Iterator[tuple[SampleChunk, Any]]:
        """Each chunk with its arrays, in the order in which they are read; None where samples differ in shape. With
        `apart`, each chunk with a list of its samples."""
        todo, under_way = deque(chunks), 0
        free = deque((worker, slot) for slot in range(2) for worker in range(len(self._pipes)))
        while todo or under_way:
            while todo and free:
                worker, slot = free.popleft()
                with self._check_alive(worker):
                    self._pipes[worker].send((slot, todo.popleft(), in_epoch, apart))
                under_way += 1
            for pipe in connections.wait(self._pipes):
                worker = self._pipes.index(pipe)  # type: ignore[arg-type]
                with self._check_alive(worker):
                    chunk, slot, result = self._pipes[worker].recv()
                if isinstance(result, BaseException):
                    raise result
                yield chunk, result if apart else self._arrays(worker, slot, result)
                free.append((worker, slot))
                under_way -= 1

    @contextmanager
    def _check_alive(self, worker: int) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionResetError, BrokenPipeError):
            process = self._processes[worker]
            process.join(PARENT_CHECK_S)
            raise RuntimeError(f"a process of data.workers ended with exit code {process.exitcode}") from None

    def _arrays(self, worker: int, slot: int, result: Any) -> Arrays | None:
        if not isinstance(result, list):
            return None if result is None else dict(result)
        at = (2 * worker + slot) * self._slot
        return {
            key: np.frombuffer(self._memory, dtype, int(np.prod(shape)), at + offset).reshape(shape)
            for key, dtype, shape, offset in result
        }

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []


def _cut(ids: Ints, indices: Ints, parts: list[slice]) -> list[SampleChunk]:
    return [
        SampleChunk(number, start - part.start, ids[start:end], indices[start:end])
        for number, part in enumerate(parts)
        for start in range(part.start, part.stop, CHUNK_SAMPLES)
        for end in [min(start + CHUNK_SAMPLES, part.stop)]
    ]


def _work(
    dataset: Dataset,
    pipe: connections.Connection[Any, Any],
    slots: list[memoryview],
    parent: int,
    files: dict[int, int],
) -> None:  # pragma: no cover - runs in a forked process
    """Read chunks until the pipe or the parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    reopen(files)
    while True:
        while not pipe.poll(PARENT_CHECK_S):
            if os.getppid() != parent:
                os._exit(0)
        try:
            slot, chunk, in_epoch, apart = pipe.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        try:
            result: Any = (
                list(_samples(dataset, chunk, in_epoch)) if apart else _read_into(dataset, chunk, in_epoch, slots[slot])
            )
        except BaseException as error:  # raised again in the rank
            result = error
        try:
            pipe.send((chunk, slot, result))
        except (TypeError, AttributeError, ValueError):  # an error that cannot be pickled
            pipe.send((chunk, slot, RuntimeError(f"{type(result).__name__}: {result}")))


def _samples(dataset: Dataset, chunk: SampleChunk, in_epoch: int) -> Iterator[Arrays]:
    for k, i in zip(chunk.ids, chunk.indices, strict=True):
        yield {key: np.asarray(v) for key, v in read_sample(dataset, int(k), int(i), in_epoch).items()}


def _shapes(sample: Arrays) -> dict[str, Any]:
    return {key: (v.shape, v.dtype) for key, v in sample.items()}


def _read_into(dataset: Dataset, chunk: SampleChunk, in_epoch: int, slot: memoryview) -> Any:
    """Read the samples of a chunk into a slot, one after the other: where in it each array is. The arrays themselves if
    they do not fit, None if samples differ in shape."""
    samples = _samples(dataset, chunk, in_epoch)
    first, count = next(samples), len(chunk.ids)
    places, at = [], 0
    for key, array in first.items():
        places.append((key, array.dtype.str, (count, *array.shape), at))
        at += -(-array.nbytes * count // 64) * 64
    whole = chain((first,), samples)
    if at > len(slot):
        read = list(whole)
        same = all(_shapes(sample) == _shapes(first) for sample in read)
        return {key: np.stack([sample[key] for sample in read]) for key in first} if same else None
    held = {key: np.frombuffer(slot, np.dtype(d), int(np.prod(shape)), a).reshape(shape) for key, d, shape, a in places}
    for number, sample in enumerate(whole):
        if _shapes(sample) != _shapes(first):
            return None
        for key, array in sample.items():
            held[key][number] = array
    return places
