"""Copies of frequently used experts on other ranks of ep: weights are sent to the copies, gradients are summed at home.

Each expert has one home rank with its weights, gradients and optimizer state; checkpoints know no other place. In each
forward pass a rank with a copy receives the weights, and in the backward pass it returns the gradients of its tokens,
which the home adds to its own. So the sums are those of one expert, computed in two parts.

    home       weights ──────▶ own tokens ──▶ gradients + gradients of copies
                  └▶ sent ▶─┐                    ▲
    a copy                  └─▶ other tokens ──▶ gradients
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weft.comm.axis import Axis
from weft.comm.overlapped_exchange import RowExchange

Matrices = tuple[Tensor | None, ...]
Through = Callable[[Matrices, Tensor, Tensor], Tensor]
"""Computes rows, sorted by expert and counted, with these matrices."""


@dataclass(frozen=True)
class ExpertCopies:
    """The placement of copies: `pairs` are (expert, rank); each of `ranks` is the home of `own` experts.

    The slots of a rank are its own experts, then borrowed ones by number; ranks with fewer borrowed experts have unused
    slots.
    """

    own: int
    ranks: int
    pairs: tuple[tuple[int, int], ...]
    tables: dict[torch.device, Tensor] = field(default_factory=dict, compare=False)
    """`parts`, on the devices that have asked for it."""

    @cached_property
    def borrowed(self) -> list[list[int]]:
        """By rank, the experts it has copies of."""
        return [sorted(e for e, r in self.pairs if r == rank) for rank in range(self.ranks)]

    @cached_property
    def width(self) -> int:
        """Slots of each rank."""
        return self.own + max(len(g) for g in self.borrowed)

    @cached_property
    def parts(self) -> list[tuple[int, int, int, int]]:
        """By expert and holder: the expert, the index of the holder, the number of holders, and the holder's slot,
        counted over all ranks."""
        out = []
        for expert in range(self.own * self.ranks):
            home, index = divmod(expert, self.own)
            places = [home * self.width + index]
            places += [r * self.width + self.own + g.index(expert) for r, g in enumerate(self.borrowed) if expert in g]
            out += [(expert, turn, len(places), place) for turn, place in enumerate(places)]
        return out

    def divide(self, counts: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Divide this rank's rows of each expert, [experts], evenly among its holders.

        Returns the rows for each slot, [ranks, slots], and in row order the slots and their counts.
        """
        if counts.device not in self.tables:
            self.tables[counts.device] = torch.tensor(self.parts, device=counts.device)
        experts, turns, holders, places = self.tables[counts.device].unbind(1)
        turns = (turns + rank) % holders  # remainders go to different holders on different ranks
        shares = (counts[experts] + holders - 1 - turns) // holders
        leaving = counts.new_zeros(self.ranks * self.width).index_copy_(0, places, shares)
        return leaving.view(self.ranks, self.width), places, shares

    def compute_with_borrowed(
        self, ep: Axis, rows_of_copies: int, through: Through, own: Matrices, x: Tensor, counts: Tensor
    ) -> Tensor:
        """Compute rows with this rank's experts while borrowed weights are received, then the last `rows_of_copies`
        rows."""
        mine = self.borrowed[ep.rank]
        copied = [[e % self.own for e in g if e // self.own == ep.rank] for g in self.borrowed]
        exchange = RowExchange(
            ep, [len(g) for g in copied], [sum(e // self.own == r for e in mine) for r in range(ep.size)]
        )
        kept = [w for w in own if w is not None]
        *here, rows = _CopyExperts.apply([e for g in copied for e in g], *kept)
        under_way = exchange.start(rows)
        first, last = x.split([len(x) - rows_of_copies, rows_of_copies])
        y = through(_in_place_of(own, here), first, counts[: self.own])
        flat = exchange.wait(under_way).split([w[0].numel() for w in kept], 1)
        borrowed = [part.reshape(len(mine), *w.shape[1:]) for part, w in zip(flat, kept, strict=True)]
        return torch.cat([y, through(_in_place_of(own, borrowed), last, counts[self.own : self.own + len(mine)])])


def _in_place_of(some: Matrices, others: list[Tensor]) -> Matrices:
    rest = iter(others)
    return tuple(None if w is None else next(rest) for w in some)


class _CopyExperts(torch.autograd.Function):
    """The matrices, and copies of those of a few experts: [copied experts, elements of all matrices].

    Gradients of copies are added in place, expert by expert, without another tensor as large as all experts.
    """

    @staticmethod
    def forward(ctx: Any, copied: list[int], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.copied, ctx.sizes = copied, [w[0].numel() for w in weights]
        index = torch.tensor(copied, dtype=torch.long, device=weights[0].device)
        rows = torch.cat([w.index_select(0, index).flatten(1) for w in weights], 1)
        return *(w.view_as(w) for w in weights), rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *own, rows = grads
        for grad, parts in zip(own, rows.split(ctx.sizes, 1), strict=True):
            for expert, part in zip(ctx.copied, parts, strict=True):
                grad[expert] += part.view_as(grad[expert])
        return None, *own
