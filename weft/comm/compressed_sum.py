"""Sums over an axis of numbers that travel encoded: in two halves, by lists of the largest, or as low-rank matrices.

Each function returns the sum and, where the codec does not send everything, what this rank's peers did not get of it.
All ranks end with the same bits: what is handed out is decoded by everyone alike, also by who encoded it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from weft.comm.axis import Axis
from weft.comm.codecs import Agree, Codec, Dice, passed_on, sum_of

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that pauses wherever something is on its way, so that other work can be done meanwhile."""


def finished(steps: Steps[T]) -> T:
    """All of them at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(T, end.value)


def largest_of(axis: Axis, device: torch.device) -> Agree:
    """How the ranks of an axis agree on the largest of their numbers."""
    return lambda values: axis.all_reduce(torch.tensor(values, device=device), dist.ReduceOp.MAX).tolist()


def _others(x: Tensor, rank: int) -> Tensor:
    """The rows of all ranks but one; no copy where they are contiguous."""
    if rank in (0, len(x) - 1):
        return x[1:] if rank == 0 else x[:-1]
    return torch.cat([x[:rank], x[rank + 1 :]])


def _apart(x: Tensor, rank: int) -> list[Tensor]:
    """The rows before a rank's and after it."""
    return [x[:rank], x[rank + 1 :]]


def _exchange(axis: Axis, codec: Codec, x: Tensor, dice: Dice | None) -> Steps[tuple[Tensor, Tensor | None]]:
    """Of x, [ranks, n], each row to its rank: what came of the others' for this one, and what they did not get."""
    n, rank = x.shape[1], axis.rank
    sent = codec.encode(_others(x, rank), dice, largest_of(axis, x.device))
    nothing = sent.new_zeros(1, sent.shape[1])
    came, travelling = axis.start_swap(torch.cat([sent[:rank], nothing, sent[rank:]]))
    error = None
    if codec.feedback:
        error = torch.empty_like(x)
        error[rank].zero_()
        each = zip(_apart(x, rank), _apart(error, rank), (sent[:rank], sent[rank:]), strict=True)
        for theirs, missing, told in each:
            if len(told):
                torch.sub(theirs, codec.decode(told, n, missing), out=missing)
    yield
    travelling.wait()
    return _others(came, rank), error


def scatter_sum(axis: Axis, codec: Codec, x: Tensor, dice: Dice | None) -> tuple[Tensor, Tensor | None]:
    """A reduce-scatter: of x, [ranks, n], rank i gets the sum of all ranks' x[i]; its own part of it never travels."""
    came, error = finished(_exchange(axis, codec, x, dice))
    return sum_of(codec, came, x.shape[1]).add_(x[axis.rank]), error


def hand_out(axis: Axis, codec: Codec, x: Tensor, dice: Dice | None) -> tuple[Tensor, Tensor | None]:
    """An all-gather: everyone's x, [n], as [ranks, n]."""
    payload = codec.encode(x[None], dice, largest_of(axis, x.device))
    came, travelling = axis.start_gather(payload)
    travelling.wait()
    everyone = codec.decode(came, x.numel())
    return everyone, x - everyone[axis.rank] if codec.feedback else None


def sum_all(
    axis: Axis, codec: Codec, x: Tensor, dice: Dice | None, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """An all-reduce of x, [n]; the sum takes its place if that is wanted."""
    return finished(summing(axis, codec, x, dice, in_place))


def summing(
    axis: Axis, codec: Codec, x: Tensor, dice: Dice | None, in_place: bool = False
) -> Steps[tuple[Tensor, Tensor | None]]:
    """sum_all() in steps, between which something is on its way."""
    n, agree = x.numel(), largest_of(axis, x.device)
    if codec.sparse:
        payload = codec.encode(x[None], dice, agree)
        left = x - codec.decode(payload, n)[0]
        everyone, travelling = axis.start_gather(payload)
        yield
        travelling.wait()
        total = sum_of(codec, everyone, n)
        return x.copy_(total) if in_place else total, left
    whole = n % axis.size == 0
    halves = (x if whole else functional.pad(x, (0, -n % axis.size))).view(axis.size, -1)
    came, error = yield from _exchange(axis, codec, halves, dice)
    payload = passed_on(codec, came, halves[axis.rank], dice, agree, None if error is None else error[axis.rank])
    everyone, travelling = axis.start_gather(payload)
    yield
    travelling.wait()
    total = codec.decode(everyone, halves.shape[1], halves if in_place else None).reshape(-1)[:n]
    if in_place and not whole:
        total = x.copy_(total)
    return total, None if error is None else error.view(-1)[:n]


def sum_low_rank(
    axes: Sequence[Axis], matrices: list[Tensor], bases: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """PowerSGD (Vogels et al. 2019): the sums of [m, n] matrices as products of [m, r] and [r, n], of which the bases,
    [n, r], are last time's. Returns the sums, the errors and the bases for the next time."""
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
    flat = torch.cat([p.reshape(-1) for p in parts])
    for axis in axes:
        axis.broadcast(flat, 0)
    return [s.view_as(p) for s, p in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]


def _summed(axes: Sequence[Axis], parts: list[Tensor]) -> list[Tensor]:
    """The sums of small tensors over all ranks of some axes, in one message an axis."""
    flat = torch.cat([p.reshape(-1) for p in parts])
    for axis in axes:
        axis.all_reduce(flat)
    return [s.view_as(p) for s, p in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]
