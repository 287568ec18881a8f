"""All-to-all of rows that overlaps with computation, in the forward and the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.axis import Axis, Pending


@dataclass
class RowExchange:
    """One exchange of rows: how many are sent to and received from each rank, and the pending work."""

    axis: Axis
    send: list[int]
    receive: list[int]
    work: Pending | None = None
    back: Tensor | None = None

    def start(self, x: Tensor) -> Tensor:
        """Start the exchange; the rows are valid after wait()."""
        out: Tensor = _Start.apply(x, self)
        return out

    def wait(self, x: Tensor) -> Tensor:
        """The rows that start() returned, received."""
        out: Tensor = _Wait.apply(x, self)
        return out

    def go(self, x: Tensor) -> Tensor:
        """Exchange and wait."""
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
        exchange.work = None  # it keeps what was sent, and this object lives until the backward pass
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange  # autograd runs the overlapped computation before it reaches the start
        exchange.back, exchange.work = exchange.axis.start_all_to_all(grads[0], exchange.receive, exchange.send)
        return grads[0], None
