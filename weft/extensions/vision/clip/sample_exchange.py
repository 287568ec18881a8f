"""Moves the samples of a batch to the ranks that compute a tower, and the tower's vectors back.

Every rank reads its own samples. A tower's data-parallel groups take equal shares of all of them, in order, and the tp
ranks of a group take the same ones:

    inputs   owner ──▶ every tp rank of the group that computes the sample
    vectors  first tp rank of the group ──▶ owner

Each is the other's gradient: that of a vector goes to all tp ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm.axis import Axis


class SampleExchange:
    """The exchange of one tower; collective over all ranks."""

    def __init__(self, axis: Axis, groups: Sequence[Sequence[int]]):
        """`groups` are the ranks of each data-parallel group of the tower."""
        self.axis, self.groups = axis, groups
        self.group_of = {rank: number for number, group in enumerate(groups) for rank in group}

    def share(self, rank: int, rows: int) -> range:
        """The samples that a rank computes, of all ranks' `rows` each."""
        total, count = rows * self.axis.size, len(self.groups)
        number = self.group_of.get(rank)
        return range(0) if number is None else range(total * number // count, total * (number + 1) // count)

    def to_tower(self, x: Tensor, rows: int) -> Tensor:
        """From this rank's samples [rows, ...] to those that it computes."""
        ranks, mine = range(self.axis.size), self._owned(self.axis.rank, rows)
        wanted = [_common(mine, self.share(rank, rows)) for rank in ranks]
        parts = [x[part.start - mine.start : part.stop - mine.start] for part in wanted]
        computed = self.share(self.axis.rank, rows)
        receive = [len(_common(computed, self._owned(rank, rows))) for rank in ranks]
        return self._exchange(torch.cat(parts), [len(part) for part in wanted], receive)

    def to_owners(self, y: Tensor, rows: int) -> Tensor:
        """From the vectors of the samples that this rank computes to those of its own samples [rows, ...]."""
        ranks, me = range(self.axis.size), self.axis.rank
        computed = self.share(me, rows) if me in self._senders() else range(0)
        send = [len(_common(computed, self._owned(rank, rows))) for rank in ranks]
        mine = self._owned(me, rows)
        receive = [len(_common(mine, self.share(rank, rows))) if rank in self._senders() else 0 for rank in ranks]
        return self._exchange(y[: len(computed)], send, receive)

    def _senders(self) -> set[int]:
        return {group[0] for group in self.groups}

    def _owned(self, rank: int, rows: int) -> range:
        return range(rank * rows, (rank + 1) * rows)

    def _exchange(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        sent = x.to(torch.uint8) if x.dtype == torch.bool else x
        out, work = self.axis.start_all_to_all(sent, send, receive)
        work.wait()
        return out.to(x.dtype)


def _common(a: range, b: range) -> range:
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


Move = Callable[[Tensor, int], Tensor]


class _Moved(torch.autograd.Function):
    """One exchange in the forward pass, the opposite one of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, there: Move, back: Move) -> Tensor:
        ctx.rows, ctx.back = rows, back
        return there(x, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0].contiguous(), ctx.rows), None, None, None


def moved_to_tower(x: Tensor, exchange: SampleExchange, rows: int) -> Tensor:
    """The samples that this rank computes; the gradient goes back to their owners."""
    out: Tensor = _Moved.apply(x, rows, exchange.to_tower, exchange.to_owners)
    return out


def moved_to_owners(y: Tensor, exchange: SampleExchange, rows: int) -> Tensor:
    """The vectors of this rank's own samples; the gradient goes to the ranks that computed them."""
    out: Tensor = _Moved.apply(y, rows, exchange.to_owners, exchange.to_tower)
    return out
