"""Mixture of experts: a router sends each token to a few of many feed-forward parts, and adds up what they say.

    x ─▶ router ─▶ which experts, with what weight
      └▶ sorted by expert ─▶ one grouped product each ─▶ back in order, weighted and summed ─▶ y

No token is dropped unless a capacity says so. The module knows nothing of how it is spread: what a layout changes is
behind `Spread`. Auxiliary losses are sums over tokens, divided by the count of valid targets as the loss itself is;
they enter the gradients where the weights leave the router, so no stage of a pipeline has to hand them on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.job.schema import Experts, Model
from weft.models.attention import Where
from weft.models.feedforward import FeedForward
from weft.models.grouped import dispatch, gather_weighted, product

AUX_WEIGHT = {"aux": 0.01, "bias": 0.0, "none": 0.0}
"""Of the auxiliary loss, where the job does not say."""


Guide = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""Decides in a router's place: from how it ranks the experts [batch, tokens, experts], what it would choose
[batch, tokens, k], the samples [batch] and the tokens' places, to what is chosen."""


Around = Callable[[Callable[..., Tensor], tuple[Tensor | None, ...], Tensor, Tensor], Tensor]
"""Computes in the experts' place: from how rows go through matrices, this rank's matrices, the rows and their counts.
It is called where the weights are whole."""


class Router(nn.Module):
    """A score for each expert, always in fp32: rounding would decide where a token goes."""

    def __init__(self, dim: int, count: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float())


class Stack(nn.Module):
    """One matrix of each expert: [experts of this rank, outputs, inputs]. `first` is the number of the first."""

    def __init__(self, count: int, outputs: int, inputs: int):
        super().__init__()
        self.first = 0
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs))

    def here(self) -> Tensor:
        """The matrices of this rank's experts, plain."""
        weight: Any = self.weight
        local: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
        return local


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class ExpertParts(nn.Module):
    """The experts' own feed-forward parts, on rows that are sorted by expert."""

    join: Callable[[Tensor, Tensor], Tensor] = staticmethod(gated)

    def __init__(self, m: Model, e: Experts):
        super().__init__()
        assert m.dim and e.ffn
        self.gate = Stack(e.count, e.ffn, m.dim) if m.activation == "swiglu" else None
        self.up = Stack(e.count, e.ffn, m.dim)
        self.down = Stack(e.count, m.dim, e.ffn)

    def forward(self, x: Tensor, counts: Tensor, around: Around | None = None) -> Tensor:
        # x [rows, dim]; counts [experts of this rank], and their sum is the number of rows
        matrices = tuple(None if s is None else s.here() for s in (self.gate, self.up, self.down))
        return self.through(matrices, x, counts) if around is None else around(self.through, matrices, x, counts)

    def through(self, matrices: tuple[Tensor | None, ...], x: Tensor, counts: Tensor) -> Tensor:
        """Rows through the experts whose gate (where there is one), up and down matrices these are."""
        gate, up, down = matrices
        assert up is not None and down is not None
        made = product(x, up, counts)
        hidden = F.gelu(made, approximate="tanh") if gate is None else self.join(product(x, gate, counts), made)
        return product(hidden, down, counts)


class Spread:
    """What a layout changes of a mixture of experts; here, on one rank, nothing."""

    def enter(self, x: Tensor) -> Tensor:
        """The tokens that this rank routes, of those it is given [batch, seq, dim]."""
        return x

    def leave(self, y: Tensor, length: int) -> Tensor:
        """What was made of them, as the tokens were given."""
        return y

    def rows(self, rows: Tensor) -> Tensor:
        """The places in the sequence of the tokens that this rank routes."""
        return rows

    def total(self, counts: Tensor) -> Tensor:
        """Counts by sequence [batch, experts], summed over the ranks that hold parts of the same sequences."""
        return counts

    def whole(self, chosen: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, slice]:
        """Choices [batch, tokens, k] and places of whole sequences, and where this rank's own stand in them."""
        return chosen, rows, slice(None)

    def carry(
        self, experts: nn.Module, x: Tensor, counts: Tensor, meanwhile: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Rows sorted by expert to their experts and back; `meanwhile` is computed while they travel.

        Rows after those that are counted belong to no expert, and what comes back for them has no meaning.
        """
        counts = counts.clone()
        counts[-1] += len(x) - counts.sum()  # the last expert computes them too: their weight is zero
        return experts(x, counts), meanwhile()


class Routing(NamedTuple):
    """Where tokens go."""

    chosen: Tensor
    """[tokens, k]; `count` itself where a token goes to no expert."""
    weights: Tensor
    """[tokens, k], zero there."""


class MixtureOfExperts(nn.Module):
    """Router, experts, and the experts that every token uses. Names: router, experts.{gate,up,down}, shared."""

    guide: Guide | None = None
    """Who decides where tokens go, if it is not the router: a proof compares runs on the same way."""
    bias: Tensor | None
    """What is added to an expert's score when it is chosen, and learns from the load (balance bias)."""
    past: Tensor | None
    """Load of the step before, over an even share (aux_scope batch)."""
    unit: Tensor
    """The gradient of the loss as the backward pass begins with it; auxiliary losses begin with the same."""
    tally: Tensor
    """Since it was last read: tokens by expert, tokens dropped, and the sums of the two auxiliary losses."""

    def __init__(self, m: Model):
        super().__init__()
        e = m.experts
        assert m.dim and e and e.ffn
        self.options, self.spread = e, Spread()
        self.router = Router(m.dim, e.count)
        self.experts = ExpertParts(m, e)
        wide = m.model_copy(update={"ffn": e.shared * e.ffn, "bias": False})
        self.shared = FeedForward(wide) if e.shared else None
        self.aux_weight = AUX_WEIGHT[e.balance] if e.aux_weight is None else e.aux_weight
        # buffers have values even where the weights have none yet
        here = torch.device("cpu")
        self.register_buffer("bias", torch.zeros(e.count, device=here) if e.balance == "bias" else None)
        by_batch = self.aux_weight > 0 and e.aux_scope == "batch"
        self.register_buffer("past", torch.ones(e.count, device=here) if by_batch else None)
        self.register_buffer("unit", torch.ones((), device=here), persistent=False)
        self.register_buffer("tally", torch.zeros(e.count + 3, dtype=torch.float64, device=here), persistent=False)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        rows = self.spread.rows(where.rows)
        tokens = self.spread.enter(x)  # [batch, seq, dim]
        batch, seq, dim = tokens.shape
        flat = tokens.reshape(-1, dim)
        chosen, weights = self.route(flat, batch, rows, where)
        ids = chosen.flatten()
        order = torch.argsort(ids, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        numbers = torch.arange(self.options.count + 1, device=ids.device)
        counts = torch.searchsorted(ids.index_select(0, order), numbers).diff()
        sent = dispatch(flat, order, inverse, self.options.top_k)
        back, always = self.spread.carry(
            self.experts, sent, counts, lambda: None if self.shared is None else self.shared(x, where)
        )
        y = gather_weighted(back, weights.to(back.dtype), order, inverse)
        out = self.spread.leave(y.view(batch, seq, dim), x.shape[1])
        return out if always is None else out + always

    def route(self, flat: Tensor, batch: int, rows: Tensor, where: Where) -> Routing:
        """Choose experts for tokens [batch · seq, dim] that stand at `rows` of their sequences."""
        e, length = self.options, where.length
        logits = self.router(flat)  # [tokens, experts]
        scores = logits.softmax(1) if e.router == "softmax" else logits.sigmoid()
        with torch.no_grad():
            real = (rows < length).repeat(batch).unsqueeze(1)  # padding goes nowhere
            ranked = scores if self.bias is None else scores + self.bias
            asked = self.choose(ranked)
            if self.guide is not None:
                shown = ranked.view(batch, -1, e.count), asked.view(batch, -1, e.top_k)
                asked = self.guide(*shown, where.samples, rows).flatten(0, 1)
            asked = torch.where(real, asked, e.count)
            chosen = self._within_capacity(asked, batch, rows, length)
        weights = scores.gather(1, torch.where(real, asked, 0))
        if e.top_k > 1 if e.renormalize is None else e.renormalize:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
        weights = weights * e.scale * (chosen < e.count)
        if torch.is_grad_enabled():
            weights = self._balanced(weights, logits, scores, asked, chosen, batch, length)
        return Routing(chosen, weights)

    def choose(self, ranked: Tensor) -> Tensor:
        """The numbers of each token's experts [tokens, k], from their scores [tokens, experts] with the bias, which
        decides who is chosen, never with what weight."""
        e = self.options
        if e.top_groups is not None and e.top_groups < e.groups:
            grouped = ranked.view(len(ranked), e.groups, -1)
            # a group is as good as its best two (DeepSeek-V3 §2.1.2), or its best one (DeepSeek-V2 §2.2.2)
            best = min(2 if e.router == "sigmoid" else 1, grouped.shape[-1])
            strength = grouped.topk(best, dim=-1).values.sum(-1)
            allowed = torch.zeros_like(strength, dtype=torch.bool)
            allowed.scatter_(1, strength.topk(e.top_groups, dim=-1).indices, True)
            ranked = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
        return ranked.topk(e.top_k, dim=-1).indices

    def _within_capacity(self, asked: Tensor, batch: int, rows: Tensor, length: int) -> Tensor:
        """Of a sequence's tokens that ask for an expert, only the first so many get it: none depends on later ones."""
        e = self.options
        if e.capacity is None or not self.training:
            return asked
        room = -int(-e.capacity * length * e.top_k // e.count)
        every, places, mine = self.spread.whole(asked.view(batch, -1, e.top_k), rows)
        in_order = torch.argsort(places)
        ids = every[:, in_order].flatten(1)  # [batch, tokens · k]
        order = torch.argsort(ids, dim=1, stable=True)
        ranked = ids.gather(1, order)
        starts = torch.searchsorted(ranked, torch.arange(e.count + 1, device=ids.device).expand(batch, -1).contiguous())
        turn = torch.arange(ids.shape[1], device=ids.device) - starts.gather(1, ranked)
        kept = torch.empty_like(ids, dtype=torch.bool).scatter_(1, order, turn < room)
        out = torch.empty_like(every, dtype=torch.bool)
        out[:, in_order] = kept.view(every.shape)
        return torch.where(out[:, mine].reshape(asked.shape), asked, e.count)

    def _balanced(
        self, weights: Tensor, logits: Tensor, scores: Tensor, asked: Tensor, chosen: Tensor, batch: int, length: int
    ) -> Tensor:
        """The same weights, whose backward pass counts the load and brings in the auxiliary losses."""
        e = self.options
        with torch.no_grad():
            each = counts_by_row(asked.view(batch, -1), e.count)  # [batch, experts]
            dropped = (asked != chosen).sum()
        aux = z = None
        real = asked[:, :1] < e.count
        if self.aux_weight:
            share = scores if e.router == "softmax" else scores / scores.sum(1, keepdim=True)
            with torch.no_grad():
                over_even = self.past
                if over_even is None:
                    over_even = self.spread.total(each.clone()).float() * (e.count / (e.top_k * length))
                over_even = over_even.expand(batch, -1).unsqueeze(1)
            aux = self.aux_weight * ((share * real).view(batch, -1, e.count) * over_even).sum()
        if e.z_weight:
            z = e.z_weight * (logits.logsumexp(1, keepdim=True).square() * real).sum()
        with torch.no_grad():
            nothing = torch.zeros((), device=weights.device)
            terms = [each.sum(0), dropped.view(1), *((nothing if t is None else t).view(1) for t in (aux, z))]
            seen = torch.cat([t.double() for t in terms])
        penalty = sum((t for t in (aux, z) if t is not None), start=torch.zeros((), device=weights.device))
        out: Tensor = _Attach.apply(weights, penalty, self.unit, self.tally, seen)
        return out


def counts_by_row(ids: Tensor, count: int) -> Tensor:
    """How often each of the numbers below `count` occurs in each row, [rows, count]."""
    return (ids.unsqueeze(2) == torch.arange(count, device=ids.device)).sum(1)


class _Attach(torch.autograd.Function):
    """Weights as they are. Going back, a loss of its own joins in, and what was seen is added to a tally.

    Going back happens once for each microbatch that is learned from, whatever is recomputed, and never in evaluation.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, penalty: Tensor, unit: Tensor, tally: Tensor, seen: Tensor) -> Tensor:
        ctx.unit, ctx.tally, ctx.seen = unit, tally, seen
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.tally.add_(ctx.seen)
        return grads[0], ctx.unit.clone(), None, None, None
