"""A block for long sequences: runs in chunks of tokens and saves few activations, optionally offloaded.

    x ─▶ before, by chunks ─▶ q k v ─▶ attention ─▶ y ─▶ after, by chunks ─▶ out

x, y and the log-sum-exp are saved for the backward pass, on the device or in host memory. Queries, keys, values and all
other token-wise results are computed again, chunk by chunk; attention, whose cost is quadratic, is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.memory.host_offload import HostOffload
from weft.models.attention import TokenInfo
from weft.models.attention_kernels import Grads, attend, attend_backward
from weft.models.attention_sinks import add_sinks, sinks_gradient

Kept = tuple[Tensor, Tensor]


class AttentionCore(Protocol):
    """Attention with an explicit backward pass: gradients of queries, keys and values, and of sinks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, info: TokenInfo) -> tuple[Tensor, Kept]: ...
    def again(self, kept: Kept) -> Tensor: ...
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Kept, causal: bool, info: TokenInfo
    ) -> tuple[Grads, Tensor | None]: ...


class LocalAttention:
    """All tokens on this device."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, info: TokenInfo) -> tuple[Tensor, Kept]:
        out, lse = attend(q, k, v, info.limits(causal))
        if info.sinks is not None:
            out, lse = add_sinks(out, lse, info.sinks)
        return out, (out, lse)

    def again(self, kept: Kept) -> Tensor:
        return kept[0]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Kept, causal: bool, info: TokenInfo
    ) -> tuple[Grads, Tensor | None]:
        dsinks = None if info.sinks is None else sinks_gradient(dout, *kept, info.sinks)
        return attend_backward(dout, q, k, v, *kept, info.limits(causal)), dsinks


def run_in_chunks(block: nn.Module, core: AttentionCore | None, chunk: int, cut: int, offload: HostOffload) -> None:
    """Make a block run in chunks; names and parameters do not change.

    `cut` is the number of ranks over which tp shards the sequence outside of attention.
    """
    chunked = _ChunkedBlock(block, core or LocalAttention(), chunk, cut, offload)
    block.forward = chunked


class _ChunkedBlock:
    def __init__(self, block: Any, core: AttentionCore, chunk: int, cut: int, offload: HostOffload):
        self.block, self.core, self.chunk, self.cut, self.offload = block, core, chunk, cut, offload
        self.causal: bool = block.attn.causal

    def __call__(self, x: Tensor, info: TokenInfo) -> Tensor:
        if not torch.is_grad_enabled():
            return self.run(x, info)[0]
        out: Tensor = _ChunkedFunction.apply(self, info, x, *self.parameters())
        return out

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.block.parameters() if p.requires_grad]

    def run(self, x: Tensor, info: TokenInfo) -> tuple[Tensor, Kept]:
        q, k, v = self.project(x, info)
        y, kept = self.core.forward(q, k, v, self.causal, self.block.attn.limited(info))
        del q, k, v
        out = torch.empty_like(x)
        for part in self.parts(x):
            part.put(out, self.block.after(part.take(x), part.take_all(y), part.info(info)))
        return out, kept

    def project(self, x: Tensor, info: TokenInfo) -> tuple[Tensor, ...]:
        """Queries, keys and values of all tokens."""
        parts = self.parts(x)
        if len(parts) == 1:
            return tuple(self.block.before(x, info))
        whole: tuple[Tensor, ...] = ()
        for part in parts:
            made = self.block.before(part.take(x), part.info(info))
            whole = whole or tuple(t.new_empty((t.shape[0], self.cut * x.shape[1], *t.shape[2:])) for t in made)
            for place, value in zip(whole, made, strict=True):
                part.put_all(place, value)
        return whole

    def parts(self, x: Tensor) -> list[_Part]:
        step = self.chunk or x.shape[1]
        return [_Part(a, min(step, x.shape[1] - a), self.cut) for a in range(0, x.shape[1], step)]

    def backward(
        self, x: Tensor, kept: list[Tensor], info: TokenInfo, dout: Tensor
    ) -> tuple[Tensor, list[Tensor | None]]:
        parameters = self.parameters()
        total: list[Tensor | None] = [None] * len(parameters)
        y = self.core.again((kept[0], kept[1]))
        dx, dy = torch.empty_like(x), torch.empty_like(y)
        for part in self.parts(x):
            with torch.enable_grad():
                a, b = part.take(x).detach().requires_grad_(), part.take_all(y).detach().requires_grad_()
                made = self.block.after(a, b, part.info(info))
            da, db, *grads = torch.autograd.grad(made, [a, b, *parameters], part.take(dout), allow_unused=True)
            part.put(dx, da)
            part.put_all(dy, db)
            _add(total, grads)
            del made, a, b, da, db, grads
        del dout, y
        with torch.no_grad():
            q, k, v = self.project(x, info)
            with torch.enable_grad():
                limited = self.block.attn.limited(info)
            each, dsinks = self.core.backward(dy, q, k, v, (kept[0], kept[1]), self.causal, limited)
        if dsinks is not None:
            _add(total, torch.autograd.grad(limited.sinks, parameters, dsinks, allow_unused=True))
        del q, k, v, dy
        kept.clear()
        for part in self.parts(x):
            with torch.enable_grad():
                a = part.take(x).detach().requires_grad_()
                made = self.block.before(a, part.info(info))
            upstream = [part.take_all(g) for g in each]
            da, *grads = torch.autograd.grad(made, [a, *parameters], upstream, allow_unused=True)
            part.take(dx).add_(da)
            _add(total, grads)
            del made, a, da, grads
        return dx, [None if g is None else g.to(p.dtype) for g, p in zip(total, parameters, strict=True)]


def _add(total: list[Tensor | None], grads: Sequence[Tensor | None]) -> None:
    """Add a chunk's weight gradients in fp32."""
    for i, grad in enumerate(grads):
        if grad is not None:
            before = total[i]
            total[i] = grad.float() if before is None else before.add_(grad)


class _Part:
    """A chunk of tokens. Inside tensor-parallel regions, tensors hold the tokens of `cut` ranks one after the other."""

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

    def info(self, info: TokenInfo) -> TokenInfo:
        turned = (r and (self.take_all(r[0]), self.take_all(r[1])) for r in (info.rotation, info.window_rotation))
        rotation, window_rotation = turned
        return info._replace(rotation=rotation, window_rotation=window_rotation, rows=self.take_all(info.rows, 0))


class _ChunkedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunked: _ChunkedBlock, info: TokenInfo, x: Tensor, *parameters: Tensor) -> Tensor:
        out, kept = chunked.run(x, info)
        ctx.chunked, ctx.info, ctx.entry = chunked, info, chunked.offload.put([x, *kept])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *kept = ctx.chunked.offload.get(ctx.entry)
        ctx.entry = None
        dx, parameters = ctx.chunked.backward(x, kept, ctx.info, grads[0])
        return None, None, dx, *parameters
