"""Rows that travel between the ranks of an axis while something else is computed, in both directions of autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.axis import Axis, Pending


@dataclass
class RowExchange:
    """One exchange of rows: how many go to each rank and come from it, and what is under way."""

    axis: Axis
    send: list[int]
    receive: list[int]
    work: Pending | None = None
    back: Tensor | None = None

    def start(self, x: Tensor) -> Tensor:
        """Send off; the rows are there after wait()."""
        out: Tensor = _Start.apply(x, self)
        return out

    def wait(self, x: Tensor) -> Tensor:
        """What start() returned, arrived."""
        out: Tensor = _Wait.apply(x, self)
        return out

    def go(self, x: Tensor) -> Tensor:
        """There at once."""
        return self.wait(self.start(x))


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        out, exchange.work = exchange.axis.start_all_to_all(x, exchange.send, exchange.receive)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        exchange.work.wait()
        back, exchange.work, exchange.back = exchange.back, None, None
        return back, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        assert exchange.work is not None
        exchange.work.wait()
        exchange.work = None  # it holds what was sent, and the trip lives until the backward pass
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange  # autograd goes through what was computed meanwhile before it comes to the start
        exchange.back, exchange.work = exchange.axis.start_all_to_all(grads[0], exchange.receive, exchange.send)
        return grads[0], None
