"""A block for long sequences: its linear parts run in chunks of tokens, and it remembers little and perhaps elsewhere.

    x ─▶ before, by chunks ─▶ q k v ─▶ attention ─▶ y ─▶ after, by chunks ─▶ out

Kept for the backward pass are x, y and the log-sum-exp, on the device or parked in the host's memory. Queries, keys,
values and all that is linear in tokens are computed again, chunk by chunk; attention, whose cost is quadratic, is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.memory.host_offload import Park
from weft.models.attention import Grads, Where, attend, attend_backward

Kept = tuple[Tensor, Tensor]


class Core(Protocol):
    """Attention that is differentiated by hand."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, where: Where) -> tuple[Tensor, Kept]: ...
    def again(self, kept: Kept) -> Tensor: ...
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Kept, causal: bool, where: Where
    ) -> Grads: ...


class WholeCore:
    """All tokens on this device."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, where: Where) -> tuple[Tensor, Kept]:
        out, lse = attend(q, k, v, causal, _docs(where))
        return out, (out, lse)

    def again(self, kept: Kept) -> Tensor:
        return kept[0]

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Kept, causal: bool, where: Where) -> Grads:
        return attend_backward(dout, q, k, v, *kept, causal, _docs(where))


def _docs(where: Where) -> tuple[Tensor, Tensor] | None:
    return None if where.docs is None else (where.docs, where.docs)


def lengthen(block: nn.Module, core: Core | None, chunk: int, cut: int, park: Park) -> None:
    """Make a block run this way; names and parameters stay as they are.

    `cut` is the number of ranks among which tp cuts the sequence outside of attention.
    """
    long = _LongBlock(block, core or WholeCore(), chunk, cut, park)
    block.forward = long


class _LongBlock:
    def __init__(self, block: Any, core: Core, chunk: int, cut: int, park: Park):
        self.block, self.core, self.chunk, self.cut, self.park = block, core, chunk, cut, park
        self.causal: bool = block.attn.causal

    def __call__(self, x: Tensor, where: Where) -> Tensor:
        if not torch.is_grad_enabled():
            return self.run(x, where)[0]
        out: Tensor = _Long.apply(self, where, x, *self.parameters())
        return out

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.block.parameters() if p.requires_grad]

    def run(self, x: Tensor, where: Where) -> tuple[Tensor, Kept]:
        q, k, v = self.project(x, where)
        y, kept = self.core.forward(q, k, v, self.causal, where)
        del q, k, v
        out = torch.empty_like(x)
        for part in self.parts(x):
            part.put(out, self.block.after(part.take(x), part.take_all(y), part.where(where)))
        return out, kept

    def project(self, x: Tensor, where: Where) -> tuple[Tensor, ...]:
        """Queries, keys and values of all tokens."""
        parts = self.parts(x)
        if len(parts) == 1:
            return tuple(self.block.before(x, where))
        whole: tuple[Tensor, ...] = ()
        for part in parts:
            made = self.block.before(part.take(x), part.where(where))
            whole = whole or tuple(t.new_empty((t.shape[0], self.cut * x.shape[1], *t.shape[2:])) for t in made)
            for place, value in zip(whole, made, strict=True):
                part.put_all(place, value)
        return whole

    def parts(self, x: Tensor) -> list[_Part]:
        step = self.chunk or x.shape[1]
        return [_Part(a, min(step, x.shape[1] - a), self.cut) for a in range(0, x.shape[1], step)]

    def backward(self, x: Tensor, kept: list[Tensor], where: Where, dout: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        parameters = self.parameters()
        total: list[Tensor | None] = [None] * len(parameters)
        y = self.core.again((kept[0], kept[1]))
        dx, dy = torch.empty_like(x), torch.empty_like(y)
        for part in self.parts(x):
            with torch.enable_grad():
                a, b = part.take(x).detach().requires_grad_(), part.take_all(y).detach().requires_grad_()
                made = self.block.after(a, b, part.where(where))
            da, db, *grads = torch.autograd.grad(made, [a, b, *parameters], part.take(dout), allow_unused=True)
            part.put(dx, da)
            part.put_all(dy, db)
            _add(total, grads)
            del made, a, b, da, db, grads
        del dout, y
        with torch.no_grad():
            q, k, v = self.project(x, where)
            each = self.core.backward(dy, q, k, v, (kept[0], kept[1]), self.causal, where)
        del q, k, v, dy
        kept.clear()
        for part in self.parts(x):
            with torch.enable_grad():
                a = part.take(x).detach().requires_grad_()
                made = self.block.before(a, part.where(where))
            upstream = [part.take_all(g) for g in each]
            da, *grads = torch.autograd.grad(made, [a, *parameters], upstream, allow_unused=True)
            part.take(dx).add_(da)
            _add(total, grads)
            del made, a, da, grads
        return dx, [None if g is None else g.to(p.dtype) for g, p in zip(total, parameters, strict=True)]


def _add(total: list[Tensor | None], grads: Sequence[Tensor | None]) -> None:
    """Sum up the chunks' gradients of the weights in fp32: there may be many."""
    for i, grad in enumerate(grads):
        if grad is not None:
            before = total[i]
            total[i] = grad.float() if before is None else before.add_(grad)


class _Part:
    """A chunk of tokens. Tensors inside tp's regions hold the tokens of `cut` ranks, one rank's after the other's."""

    def __init__(self, start: int, size: int, cut: int):
        self.start, self.size, self.cut = start, size, cut

    def take(self, x: Tensor) -> Tensor:
        return x.narrow(1, self.start, self.size)

    def put(self, x: Tensor, value: Tensor) -> None:
        self.take(x).copy_(value)

    def take_all(self, x: Tensor, dim: int = 1) -> Tensor:
        if self.cut == 1:
            return x.narrow(dim, self.start, self.size)
        return x.unflatten(dim, (self.cut, -1)).narrow(dim + 1, self.start, self.size).flatten(dim, dim + 1)

    def put_all(self, x: Tensor, value: Tensor) -> None:
        x.unflatten(1, (self.cut, -1)).narrow(2, self.start, self.size).copy_(value.unflatten(1, (self.cut, -1)))

    def where(self, where: Where) -> Where:
        turn = where.turn and (self.take_all(where.turn[0]), self.take_all(where.turn[1]))
        return where._replace(turn=turn, rows=self.take_all(where.rows, 0))


class _Long(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, long: _LongBlock, where: Where, x: Tensor, *parameters: Tensor) -> Tensor:
        out, kept = long.run(x, where)
        ctx.long, ctx.where, ctx.entry = long, where, long.park.put([x, *kept])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *kept = ctx.long.park.get(ctx.entry)
        ctx.entry = None
        dx, parameters = ctx.long.backward(x, kept, ctx.where, grads[0])
        return None, None, dx, *parameters
