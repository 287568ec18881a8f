"""Sums over an axis with encoded messages: as reduce-scatter and all-gather, as lists of the largest, or of low rank.

Each function returns the sum and, if the codec loses something, the part of this rank's input that was not sent. All
ranks end with the same bits: every rank decodes the same message, also the one that encoded it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from weft.comm.axis import Axis
from weft.comm.compression.codec_base import Agree, Codec, RoundingNoise
from weft.comm.shards import on_flat

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields while a message is under way, so that other work can run."""


def run_to_end(steps: Steps[T]) -> T:
    """Run all steps and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(T, end.value)


def agree_on_largest(axis: Axis, device: torch.device) -> Agree:
    """A function that returns the largest of the ranks' numbers, for each number."""
    return lambda values: axis.all_reduce(torch.tensor(values, device=device), dist.ReduceOp.MAX).tolist()


def _others(x: Tensor, rank: int) -> Tensor:
    """The rows of all ranks but one; without a copy if they are contiguous."""
    if rank in (0, len(x) - 1):
        return x[1:] if rank == 0 else x[:-1]
    return torch.cat([x[:rank], x[rank + 1 :]])


def _before_and_after(x: Tensor, rank: int) -> list[Tensor]:
    """The rows before and after a rank's."""
    return [x[:rank], x[rank + 1 :]]


def _exchange(
    axis: Axis, codec: Codec, x: Tensor, rounding: RoundingNoise | None
) -> Steps[tuple[Tensor, Tensor | None]]:
    """Send each row of x, [ranks, n], to its rank. Returns the rows received for this rank, and what was not sent."""
    n, rank = x.shape[1], axis.rank
    sent = codec.encode(_others(x, rank), rounding, agree_on_largest(axis, x.device))
    nothing = sent.new_zeros(1, sent.shape[1])
    received, pending = axis.start_swap(torch.cat([sent[:rank], nothing, sent[rank:]]))
    error = None
    if codec.feedback:
        error = torch.empty_like(x)
        error[rank].zero_()
        each = zip(_before_and_after(x, rank), _before_and_after(error, rank), (sent[:rank], sent[rank:]), strict=True)
        for theirs, missing, encoded in each:
            if len(encoded):
                torch.sub(theirs, codec.decode(encoded, n, missing), out=missing)
    yield
    pending.wait()
    return _others(received, rank), error


def scatter_sum(axis: Axis, codec: Codec, x: Tensor, rounding: RoundingNoise | None) -> tuple[Tensor, Tensor | None]:
    """A reduce-scatter: of x, [ranks, n], rank i gets the sum of all ranks' x[i]; its own row is not encoded."""
    received, error = run_to_end(_exchange(axis, codec, x, rounding))
    return codec.sum_of(received, x.shape[1]).add_(x[axis.rank]), error


def gather_encoded(axis: Axis, codec: Codec, x: Tensor, rounding: RoundingNoise | None) -> tuple[Tensor, Tensor | None]:
    """An all-gather of x, [n], as [ranks, n]."""
    payload = codec.encode(x[None], rounding, agree_on_largest(axis, x.device))
    received, pending = axis.start_gather(payload)
    pending.wait()
    gathered = codec.decode(received, x.numel())
    return gathered, x - gathered[axis.rank] if codec.feedback else None


def sum_all(
    axis: Axis, codec: Codec, x: Tensor, rounding: RoundingNoise | None, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """An all-reduce of x, [n], in place if asked."""
    return run_to_end(summing(axis, codec, x, rounding, in_place))


def summing(
    axis: Axis, codec: Codec, x: Tensor, rounding: RoundingNoise | None, in_place: bool = False
) -> Steps[tuple[Tensor, Tensor | None]]:
    """sum_all() in steps."""
    n, agree = x.numel(), agree_on_largest(axis, x.device)
    if codec.sparse:
        payload = codec.encode(x[None], rounding, agree)
        left = x - codec.decode(payload, n)[0]
        gathered, pending = axis.start_gather(payload)
        yield
        pending.wait()
        total = codec.sum_of(gathered, n)
        return x.copy_(total) if in_place else total, left
    whole = n % axis.size == 0
    halves = (x if whole else functional.pad(x, (0, -n % axis.size))).view(axis.size, -1)
    received, error = yield from _exchange(axis, codec, halves, rounding)
    missing = None if error is None else error[axis.rank]
    payload = codec.encode_sum(received, halves[axis.rank], rounding, agree, missing)
    gathered, pending = axis.start_gather(payload)
    yield
    pending.wait()
    total = codec.decode(gathered, halves.shape[1], halves if in_place else None).reshape(-1)[:n]
    if in_place and not whole:
        total = x.copy_(total)
    return total, None if error is None else error.view(-1)[:n]


def sum_low_rank(
    axes: Sequence[Axis], matrices: list[Tensor], bases: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """PowerSGD (Vogels et al. 2019): the sums of [m, n] matrices as products of [m, r] and [r, n], with the bases,
    [n, r], of the last step. Returns the sums, the errors and the bases for the next step."""
    columns = _summed(axes, [m @ q for m, q in zip(matrices, bases, strict=True)])
    columns = _from_first(axes, [torch.linalg.qr(p).Q for p in columns])
    own = [m.t() @ p for m, p in zip(matrices, columns, strict=True)]
    rows = _summed(axes, own)
    sums = [_product(p, q) for p, q in zip(columns, rows, strict=True)]
    errors = [m - p @ q.t() for m, p, q in zip(matrices, columns, own, strict=True)]
    return sums, errors, rows


def _product(columns: Tensor, rows: Tensor) -> Tensor:
    """columns @ rowsᵀ, equal on all ranks. cuBLAS gives the same bits for the same input; libraries for CPUs may not:
    there it is a sum of outer products, element by element."""
    if columns.is_cuda:
        return columns @ rows.t()
    total = torch.zeros(len(columns), len(rows))
    for column, row in zip(columns.t(), rows.t(), strict=True):
        total.addcmul_(column[:, None], row[None])
    return total


def _from_first(axes: Sequence[Axis], parts: list[Tensor]) -> list[Tensor]:
    """The tensors of the first rank: each rank's own may differ in the last bit."""
    return on_flat(parts, lambda flat: [axis.broadcast(flat, 0) for axis in axes])


def _summed(axes: Sequence[Axis], parts: list[Tensor]) -> list[Tensor]:
    """The sums of small tensors over all ranks of some axes, in one message an axis."""
    return on_flat(parts, lambda flat: [axis.all_reduce(flat) for axis in axes])
