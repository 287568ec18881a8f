"""Context parallelism: the sequence is sharded over cp, and attention runs over all shards.

Ring attention (Liu et al. 2023): keys and values are sent from rank to rank while the block before is computed; results
over different keys are merged by their log-sum-exp. Ulysses (Jacobs et al. 2023): an all-to-all gives each rank the
whole sequence of some heads. Both are cases of a ring of groups with Ulysses inside each: a ring has cp groups of one
rank, Ulysses one group of cp ranks, and the hybrid (Fang and Zhao 2024) is between.

parallel/context/sequence_split.py defines which rank holds which tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.autograd import sum_up
from weft.comm.axis import Axis, Exchange
from weft.models.attention import TokenInfo
from weft.models.attention_kernels import Grads, attend, attend_backward, merge
from weft.models.attention_layer import Attention
from weft.models.attention_sinks import add_sinks, sinks_gradient
from weft.models.transformer import Head
from weft.parallel.context.sequence_split import Blocks, SequenceSplit


class Context:
    """Attention over the ranks of cp. Called like any attention core; forward() and backward() are for blocks that run
    their own backward pass."""

    def __init__(self, axis: Axis, cut: SequenceSplit):
        self.axis, self.cut = axis, cut
        self.last: dict[int | None, Blocks] = {}
        axis.open()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, info: TokenInfo) -> Tensor:
        blocks = self.blocks(causal, info)
        if self.cut.ulysses > 1:
            k, v = self.spread(k), self.spread(v)
            q, k, v = ToHeads.apply(self, q, k, v)
        sinks = None if info.sinks is None else self.own(info.sinks)
        out: Tensor = _Ring.apply(self, blocks, q, k, v, sinks)
        return ToRows.apply(self, out) if self.cut.ulysses > 1 else out

    def blocks(self, causal: bool, info: TokenInfo) -> Blocks:
        """The chunks of a batch, computed once for all layers with the same window."""
        last = self.last.get(info.window)
        if last is None or (last.length, last.causal) != (info.length, causal) or last.docs is not info.docs:
            self.last[info.window] = last = Blocks(self.cut, info.length, causal, info.docs, info.window)
        return last

    def own(self, of_heads: Tensor) -> Tensor:
        """The part of the heads that this rank computes."""
        return of_heads.chunk(self.cut.ulysses)[self.cut.rank % self.cut.ulysses]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, info: TokenInfo
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The output, and what the backward pass needs besides q, k and v."""
        blocks = self.blocks(causal, info)
        out, lse = ring_forward(self, blocks, *self.to_heads(q, self.spread(k), self.spread(v)))
        if info.sinks is not None:
            out, lse = add_sinks(out, lse, self.own(info.sinks))
        return self.to_rows(out)[0], (out, lse)

    def again(self, kept: tuple[Tensor, Tensor]) -> Tensor:
        """The output again, from what was kept."""
        return self.to_rows(kept[0])[0]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, Tensor], causal: bool, info: TokenInfo
    ) -> tuple[Grads, Tensor | None]:
        """Gradients of q, k and v, and of the sinks."""
        blocks, heads, dsinks = self.blocks(causal, info), k.shape[2], None
        (dout,) = self.to_heads(dout)
        if info.sinks is not None:
            dsinks = torch.zeros_like(info.sinks)
            self.own(dsinks).copy_(sinks_gradient(dout, *kept, self.own(info.sinks)))
        q, k, v = self.to_heads(q, self.spread(k), self.spread(v))
        dq, dk, dv = self.to_rows(*ring_backward(self, blocks, dout, q, k, v, *kept))
        return (dq, _gathered(dk, heads), _gathered(dv, heads)), dsinks

    def spread(self, x: Tensor) -> Tensor:
        """Repeat key or value heads if a group has more ranks than there are heads."""
        copies = self.cut.ulysses // x.shape[2] if x.shape[2] < self.cut.ulysses else 1
        return x.repeat_interleave(copies, 2) if copies > 1 else x

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From some tokens of all heads to all tokens of the group for some heads, in one message to each peer."""
        n = self.cut.ulysses
        if n == 1:
            return tensors
        shards = torch.cat([t.unflatten(2, (n, -1)) for t in tensors], 3).movedim(2, 0)  # [peers, b, s, heads, d]
        got = self.axis.all_to_all(shards, self.cut.peers)
        whole = got.movedim(0, 1).flatten(1, 2)
        return whole.split([t.shape[2] // n for t in tensors], 2)

    def to_rows(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The inverse of to_heads()."""
        n = self.cut.ulysses
        if n == 1:
            return tensors
        shards = torch.cat(tensors, 2).unflatten(1, (n, -1)).movedim(1, 0)
        got = self.axis.all_to_all(shards, self.cut.peers)
        parts = got.split([t.shape[2] for t in tensors], 3)
        return tuple(p.movedim(0, 2).flatten(2, 3) for p in parts)

    def peer(self, group: int) -> int:
        """The rank of another group that this one exchanges with."""
        return group * self.cut.ulysses + self.cut.rank % self.cut.ulysses

    def span(self, module: nn.Module) -> None:
        """Make attention, or means over the sequence, span the ranks of cp."""
        if isinstance(module, Attention):
            module.core = self
        elif isinstance(module, Head):
            module.mean, module.first = self.mean, self.first

    def mean(self, x: Tensor, info: TokenInfo | None) -> Tensor:
        """The mean over the tokens of all ranks."""
        assert info is not None
        inside = (info.rows < info.length).view(1, -1, 1)
        return (sum_up((x * inside).sum(1, dtype=torch.float32), self.axis) / info.length).to(x.dtype)

    def first(self, x: Tensor, info: TokenInfo | None) -> Tensor:
        """The first token of the sequence, on every rank."""
        assert info is not None
        return sum_up((x * (info.rows == 0).view(1, -1, 1)).sum(1), self.axis)


def _gathered(grad: Tensor, heads: int) -> Tensor:
    return grad if grad.shape[2] == heads else grad.unflatten(2, (heads, -1)).sum(3)


class ToHeads(torch.autograd.Function):
    """Context.to_heads(); the gradient goes back by to_rows()."""

    @staticmethod
    def forward(ctx: Any, context: Context, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.context = context
        return context.to_heads(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.context.to_rows(*grads)


class ToRows(torch.autograd.Function):
    """Context.to_rows() of one tensor; the gradient goes back by to_heads()."""

    @staticmethod
    def forward(ctx: Any, context: Context, out: Tensor) -> Tensor:
        ctx.context = context
        return context.to_rows(out)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.context.to_heads(*grads)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, context: Context, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        out, lse = ring_forward(context, blocks, q, k, v)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        ctx.context, ctx.blocks = context, blocks
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dsinks = None if sinks is None else sinks_gradient(grads[0], out, lse, sinks)
        return None, None, *ring_backward(ctx.context, ctx.blocks, grads[0], q, k, v, out, lse), dsinks


Arrived = dict[int, Tensor]
"""Keys and values of some chunks, [2, batch, tokens, heads, head_dim] each."""


class _Hops:
    """Keys and values of every group, hop by hop; the next ones are received while these are used."""

    def __init__(self, context: Context, blocks: Blocks, k: Tensor, v: Tensor):
        self.context, self.blocks, self.me, self.ring = context, blocks, context.cut.group, context.cut.ring
        self.own: Arrived = {
            j: torch.stack([t[:, a : a + blocks.tokens(j)] for t in (k, v)])
            for a, j in zip(range(0, k.shape[1], blocks.size), blocks.of(self.me), strict=True)
        }

    def __iter__(self) -> Iterator[tuple[int, Arrived]]:
        """Each group and its needed chunks, this rank's own first."""
        pending = self._start(1)
        yield self.me, self.own
        for hop in range(1, self.ring):
            chunks, exchange = pending
            arrived = dict(zip(chunks, exchange.wait(), strict=True))
            pending = self._start(hop + 1)
            yield (self.me - hop) % self.ring, arrived

    def _start(self, hop: int) -> tuple[list[int], Exchange]:
        if hop >= self.ring:
            return [], Exchange([], [], [], [])
        to, of = (self.me + hop) % self.ring, (self.me - hop) % self.ring
        wanted = self.blocks.wanted(self.me, of)
        sends = [(self.context.peer(to), self.own[j]) for j in self.blocks.wanted(to, self.me)]
        receives = [(self.context.peer(of), self.like(j)) for j in wanted]
        return wanted, self.context.axis.start_exchange(sends, receives)

    def like(self, j: int) -> Tensor:
        """An empty tensor for a chunk's keys and values, or their gradients."""
        any_chunk = next(iter(self.own.values()))
        two, batch, _, heads, width = any_chunk.shape
        return any_chunk.new_empty((two, batch, self.blocks.tokens(j), heads, width))


def _queries(context: Context, blocks: Blocks) -> dict[int, slice]:
    """This group's chunks of queries, as slices without padding."""
    return {
        i: slice(a * blocks.size, a * blocks.size + blocks.tokens(i))
        for a, i in enumerate(blocks.of(context.cut.group))
    }


def ring_forward(context: Context, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of this group's queries over all keys they attend to."""
    if context.cut.ring == 1 and blocks.length == q.shape[1]:
        return attend(q, k, v, blocks.limits(0, 0))
    out = torch.zeros_like(q)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=torch.float32)
    held: dict[int, tuple[Tensor, Tensor]] = {}
    for _, arrived in _Hops(context, blocks, k, v):
        for i, rows in _queries(context, blocks).items():
            for j, (keys, values) in arrived.items():
                if blocks.sees(i, j):
                    y, log = attend(q[:, rows], keys, values, blocks.limits(i, j))
                    held[i] = merge(*held[i], y, log) if i in held else (y.float(), log)
    for i, rows in _queries(context, blocks).items():
        if i in held:
            out[:, rows], lse[:, :, rows] = held[i][0].to(q.dtype), held[i][1]
    return out, lse


def ring_backward(
    context: Context, blocks: Blocks, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Grads:
    """Keys and values are sent again; gradients of a block go back to the group that owns it."""
    if context.cut.ring == 1 and blocks.length == q.shape[1]:
        return attend_backward(dout, q, k, v, out, lse, blocks.limits(0, 0))
    dq = torch.zeros_like(q, dtype=torch.float32)
    hops = _Hops(context, blocks, k, v)
    total: Arrived = {}
    returned: list[tuple[list[int], Exchange]] = []
    for of, arrived in hops:
        grads = {j: torch.zeros_like(kv, dtype=torch.float32) for j, kv in arrived.items()}
        for i, rows in _queries(context, blocks).items():
            for j, (keys, values) in arrived.items():
                if blocks.sees(i, j):
                    found = attend_backward(
                        dout[:, rows], q[:, rows], keys, values, out[:, rows], lse[:, :, rows].contiguous(),
                        blocks.limits(i, j),
                    )  # fmt: skip
                    dq[:, rows] += found[0]
                    grads[j][0] += found[1]
                    grads[j][1] += found[2]
        _add(total, returned)
        if of == hops.me:
            total = grads
            continue
        to = 2 * hops.me - of  # as far on the other side: that group has our keys now
        back = blocks.wanted(to % hops.ring, hops.me)
        sends = [(context.peer(of), g.to(k.dtype)) for g in grads.values()]
        receives = [(context.peer(to % hops.ring), hops.like(j)) for j in back]
        returned.append((back, context.axis.start_exchange(sends, receives)))
    _add(total, returned)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for j, rows in _queries(context, blocks).items():
        dk[:, rows], dv[:, rows] = total[j].to(k.dtype)
    return dq.to(q.dtype), dk, dv


def _add(total: Arrived, returned: list[tuple[list[int], Exchange]]) -> None:
    """Add the gradients returned from the hop before."""
    while returned:
        chunks, exchange = returned.pop()
        for j, grad in zip(chunks, exchange.wait(), strict=True):
            total[j] += grad
