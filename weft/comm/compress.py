"""Sums over an axis of numbers that travel encoded: in two halves, by lists of the largest, or as low-rank matrices.

Each function returns the sum and, where the codec does not send everything, what this rank's peers did not get of it.
All ranks end with the same bits: what is handed out is decoded by everyone alike, also by who encoded it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from weft.comm.axis import Axis
from weft.comm.codecs import Agree, Codec, Dice, sum_of


def largest_of(axis: Axis, device: torch.device) -> Agree:
    """How the ranks of an axis agree on the largest of their numbers."""
    return lambda values: axis.all_reduce(torch.tensor(values, device=device), dist.ReduceOp.MAX).tolist()


def scatter_sum(axis: Axis, codec: Codec, x: Tensor, dice: Dice) -> tuple[Tensor, Tensor | None]:
    """A reduce-scatter: of x, [ranks, n], rank i gets the sum of all ranks' x[i]; its own part of it never travels."""
    others = [i for i in range(axis.size) if i != axis.rank]
    n = x.shape[1]
    theirs = x[others]
    sent = codec.encode(theirs, dice, largest_of(axis, x.device))
    payload = sent.new_zeros(axis.size, sent.shape[1])
    payload[others] = sent
    came = axis.all_to_all(payload, range(axis.size), both_ways=True)
    error = None
    if codec.feedback:
        error = torch.zeros_like(x)
        error[others] = theirs - codec.decode(sent, n)
    return x[axis.rank] + sum_of(codec, came[others], n), error


def hand_out(axis: Axis, codec: Codec, x: Tensor, dice: Dice | None) -> tuple[Tensor, Tensor | None]:
    """An all-gather: everyone's x, [n], as [ranks, n]."""
    payload = codec.encode(x[None], dice, largest_of(axis, x.device))
    everyone = codec.decode(axis.all_gather(payload, 0, both_ways=True), x.numel())
    return everyone, x - everyone[axis.rank] if codec.feedback else None


def sum_all(axis: Axis, codec: Codec, x: Tensor, dice: Dice) -> tuple[Tensor, Tensor | None]:
    """An all-reduce of x, [n]."""
    n = x.numel()
    if codec.sparse:
        payload = codec.encode(x[None], dice, largest_of(axis, x.device))
        total = sum_of(codec, axis.all_gather(payload, 0, both_ways=True), n)
        return total, x - codec.decode(payload, n)[0]
    halves = functional.pad(x, (0, -n % axis.size)).view(axis.size, -1)
    mine, error = scatter_sum(axis, codec, halves, dice)
    everyone, own = hand_out(axis, codec, mine, dice)
    if error is not None and own is not None:
        error[axis.rank] += own
    return everyone.flatten()[:n], None if error is None else error.flatten()[:n]


def sum_low_rank(
    axes: Sequence[Axis], matrices: list[Tensor], bases: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """PowerSGD (Vogels et al. 2019): the sums of [m, n] matrices as products of [m, r] and [r, n], of which the bases,
    [n, r], are last time's. Returns the sums, the errors and the bases for the next time."""
    columns = _summed(axes, [m @ q for m, q in zip(matrices, bases, strict=True)])
    columns = [torch.linalg.qr(p).Q for p in columns]
    own = [m.t() @ p for m, p in zip(matrices, columns, strict=True)]
    rows = _summed(axes, own)
    sums = [p @ q.t() for p, q in zip(columns, rows, strict=True)]
    errors = [m - p @ q.t() for m, p, q in zip(matrices, columns, own, strict=True)]
    return sums, errors, rows


def _summed(axes: Sequence[Axis], parts: list[Tensor]) -> list[Tensor]:
    """The sums of small tensors over all ranks of some axes, in one message an axis."""
    flat = torch.cat([p.reshape(-1) for p in parts])
    for axis in axes:
        axis.all_reduce(flat)
    return [s.view_as(p) for s, p in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]
