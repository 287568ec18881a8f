"""Tokens are sent to their experts in two halves: experts compute on one half while the other is under way.

    first half    ─ there ─▶ experts ─ home ──────────▶
    second half   ─ there ─────────▶ experts ─ home ──▶

Each expert's rows are halved, so each half is as balanced as the whole. Counts of both are exchanged first. The
backward pass runs the same steps in reverse, so gradients overlap too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.comm.axis import Axis
from weft.comm.overlapped_exchange import RowExchange
from weft.models.experts.grouped import dispatch, known
from weft.parallel.expert.permutation import by_expert, sorted_by


class Halves:
    """An exchange of rows sorted by expert, `counts` of each and at most `most` in all."""

    def __init__(self, ep: Axis, counts: Tensor, most: int):
        shares = torch.stack([(counts + 1) // 2, counts // 2], 1)  # [experts, halves]
        leaving = shares.view(ep.size, -1, 2).transpose(1, 2)  # [ranks, halves, experts of each]
        coming = ep.swap(leaving)
        sums = torch.stack([leaving.sum(2), coming.sum(2)])  # [there or here, ranks, halves]
        found = known(sums.permute(0, 2, 1).flatten(), 2 * most)
        cut = [found[i : i + ep.size] for i in range(0, len(found), ep.size)]
        self.coming, self.send, self.receive = coming.unbind(1), cut[:2], cut[2:]
        self.there = [RowExchange(ep, s, r) for s, r in zip(self.send, self.receive, strict=True)]
        self.home = [RowExchange(ep, r, s) for s, r in zip(self.send, self.receive, strict=True)]
        self.routed = sum(map(sum, self.send))
        places = torch.arange(2 * len(counts), device=counts.device).view(2, -1).t()  # first all of the first half
        self.order, self.inverse = sorted_by(places, shares, self.routed)

    def start(self, x: Tensor) -> list[Tensor]:
        """Start to send both halves."""
        parts = dispatch(x, self.order, self.inverse).split([sum(s) for s in self.send])
        return [exchange.start(part) for exchange, part in zip(self.there, parts, strict=True)]

    def compute(self, through: Callable[..., Tensor], matrices: Any, under_way: list[Tensor], counts: Tensor) -> Tensor:
        """Pass each half through the experts and send it back as it arrives; returns all rows."""
        back = []
        for there, home, half, coming in zip(self.there, self.home, under_way, self.coming, strict=True):
            order, inverse = by_expert(coming, sum(there.receive))
            made = through(matrices, dispatch(there.wait(half), order, inverse), coming.sum(0))
            back.append(home.start(dispatch(made, inverse, order)))
        rows = torch.cat([home.wait(half) for home, half in zip(self.home, back, strict=True)])
        return dispatch(rows, self.inverse, self.order)
