"""How a step's samples are divided among data-parallel ranks: evenly, or unevenly to relieve a slow rank.

Shares change which rank reads a sample, never which samples a step has, and the loss is a sum over valid targets, so
any shares give the same step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from weft.job.errors import JobError


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
