"""Mixture of experts: a router sends each token to a few of many feed-forward networks and sums their outputs.

    x ─▶ router ─▶ which experts, with what weight
      └▶ sorted by expert ─▶ one grouped product each ─▶ back in order, weighted and summed ─▶ y

No token is dropped unless a capacity is set. What a parallel layout changes is behind `ExpertLayout`. Auxiliary losses
are sums over tokens, divided by the count of valid targets like the loss; they are added to the gradients of the
router's weights, so that pipeline stages need not pass them on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.shards import local_of
from weft.job.schema import Experts, Model
from weft.models.attention import TokenInfo
from weft.models.experts.grouped import add_bias, dispatch, gather_weighted, product
from weft.models.feedforward import Activation, FeedForward, gated, make_activation

AUX_WEIGHT = {"aux": 0.01, "bias": 0.0, "none": 0.0}
"""Weight of the auxiliary loss where the job gives none."""


RoutingOverride = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""Replaces the router's choice: takes the scores [batch, tokens, experts], the chosen experts [batch, tokens, k], the
sample keys [batch] and the rows of the tokens, and returns the experts to use."""


ExpertCompute = Callable[[Callable[..., Tensor], tuple[Tensor | None, ...], Any, Tensor], Tensor]
"""Replaces the experts' computation: takes their function, this rank's matrices, the rows and their counts. Called
while the weights are gathered."""


class Router(nn.Module):
    """A score for each expert, always in fp32, so that rounding does not change the routing."""

    def __init__(self, dim: int, count: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, dim))
        self.bias = nn.Parameter(torch.empty(count)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class ExpertMatrices(nn.Module):
    """One matrix per expert: [experts of this rank, outputs, inputs], and one bias [experts of this rank, outputs].
    `first` is the index of the first."""

    def __init__(self, count: int, outputs: int, inputs: int, bias: bool):
        super().__init__()
        self.first = 0
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(count, outputs)) if bias else None


class ExpertFeedForward(nn.Module):
    """The experts' feed-forward networks, applied to rows sorted by expert."""

    join: Callable[[Activation, Tensor, Tensor], Tensor] = staticmethod(gated)
    """Compilation replaces it; a function, so that all blocks share its code."""

    def __init__(self, m: Model, e: Experts):
        super().__init__()
        assert m.dim and e.ffn
        self.activation = make_activation(m)
        self.gate = ExpertMatrices(e.count, e.ffn, m.dim, e.biases) if m.gated else None
        self.up = ExpertMatrices(e.count, e.ffn, m.dim, e.biases)
        self.down = ExpertMatrices(e.count, m.dim, e.ffn, e.biases)

    def forward(self, x: Tensor, counts: Tensor, compute: ExpertCompute | None = None) -> Tensor:
        # x [rows, dim]; counts [experts of this rank], and their sum is the number of rows
        layers = (self.gate, self.up, self.down)
        held = [None if s is None else s.weight for s in layers] + [None if s is None else s.bias for s in layers]
        matrices = tuple(None if p is None else local_of(p) for p in held)
        return self.through(matrices, x, counts) if compute is None else compute(self.through, matrices, x, counts)

    def through(self, matrices: tuple[Tensor | None, ...], x: Tensor, counts: Tensor) -> Tensor:
        """Apply experts with these gate (or None), up and down matrices, and their biases (or None)."""
        gate, up, down, *biases = matrices
        assert up is not None and down is not None

        def through(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            made = product(x, weight, counts)
            return made if bias is None else add_bias(made, bias, counts)

        made = through(x, up, biases[1])
        gates = None if gate is None else through(x, gate, biases[0])
        hidden = self.activation(made) if gates is None else self.join(self.activation, gates, made)
        return through(hidden, down, biases[2])


class ExpertLayout:
    """What a parallel layout changes in a mixture of experts; this one is for a single rank."""

    def enter(self, x: Tensor) -> Tensor:
        """The tokens that this rank routes, from its input [batch, seq, dim]."""
        return x

    def leave(self, y: Tensor, length: int) -> Tensor:
        """The output for the whole input, from the output for the routed tokens."""
        return y

    def rows(self, rows: Tensor) -> Tensor:
        """Rows of the tokens that this rank routes."""
        return rows

    def total(self, counts: Tensor) -> Tensor:
        """Counts by sequence [batch, experts], summed over the ranks that hold parts of the same sequences."""
        return counts

    def whole(self, chosen: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, slice]:
        """Choices [batch, tokens, k] and rows of whole sequences, and the slice of this rank."""
        return chosen, rows, slice(None)

    def carry(
        self, experts: nn.Module, x: Tensor, counts: Tensor, meanwhile: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Rows sorted by expert to their experts and back; `meanwhile` is computed while they travel.

        Rows after those that are counted belong to no expert, and what comes back for them has no meaning.
        """
        counts = counts.clone()
        counts[-1] += len(x) - counts.sum()  # the last expert computes them too; their weight is zero
        return experts(x, counts), meanwhile()


class TokenRouting(NamedTuple):
    """Where tokens go."""

    chosen: Tensor
    """[tokens, k]; `count` itself where a token goes to no expert."""
    weights: Tensor
    """[tokens, k], zero there."""


class MixtureOfExperts(nn.Module):
    """Router, experts, and the experts that every token uses. Names: router, experts.{gate,up,down}, shared,
    shared_gate."""

    routing_override: RoutingOverride | None = None
    """Chooses experts instead of the router; used by weft prove to compare runs under the same routing."""
    bias: Tensor | None
    """Added to the scores for the choice of experts, and updated from their load (balance bias)."""
    past: Tensor | None
    """Load in the previous step relative to an even share (aux_scope batch)."""
    unit: Tensor
    """Gradient at which the backward pass of the loss starts; auxiliary losses start at the same."""
    tally: Tensor
    """Since the last read: tokens per expert, dropped tokens, and the sums of the two auxiliary losses."""

    def __init__(self, m: Model):
        super().__init__()
        e = m.experts
        assert m.dim and e and e.ffn
        self.options, self.layout = e, ExpertLayout()
        self.router = Router(m.dim, e.count, e.biases)
        self.experts = ExpertFeedForward(m, e)
        wide = m.model_copy(update={"ffn": e.shared_width, "bias": False, "mlp_bias": False})
        self.shared = FeedForward(wide) if e.shared else None
        self.shared_gate = nn.Linear(m.dim, 1, bias=False) if e.shared and e.shared_gate else None
        self.aux_weight = AUX_WEIGHT[e.balance] if e.aux_weight is None else e.aux_weight
        # buffers have values even while the weights are on the meta device
        here = torch.device("cpu")
        self.register_buffer("bias", torch.zeros(e.count, device=here) if e.balance == "bias" else None)
        by_batch = self.aux_weight > 0 and e.aux_scope == "batch"
        self.register_buffer("past", torch.ones(e.count, device=here) if by_batch else None)
        self.register_buffer("unit", torch.ones((), device=here), persistent=False)
        self.register_buffer("tally", torch.zeros(e.count + 3, dtype=torch.float64, device=here), persistent=False)

    def forward(self, x: Tensor, info: TokenInfo) -> Tensor:
        rows = self.layout.rows(info.rows)
        tokens = self.layout.enter(x)  # [batch, seq, dim]
        batch, seq, dim = tokens.shape
        flat = tokens.reshape(-1, dim)
        chosen, weights = self.route(flat, batch, rows, info)
        ids = chosen.flatten()
        order = torch.argsort(ids, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        numbers = torch.arange(self.options.count + 1, device=ids.device)
        counts = torch.searchsorted(ids.index_select(0, order), numbers).diff()
        sent = dispatch(flat, order, inverse, self.options.top_k)
        back, always = self.layout.carry(self.experts, sent, counts, lambda: self._shared_output(x, info))
        y = gather_weighted(back, weights.to(back.dtype), order, inverse)
        out = self.layout.leave(y.view(batch, seq, dim), x.shape[1])
        return out if always is None else out + always

    def _shared_output(self, x: Tensor, info: TokenInfo) -> Tensor | None:
        if self.shared is None:
            return None
        out: Tensor = self.shared(x, info)
        return out if self.shared_gate is None else out * self.shared_gate(x).sigmoid()

    def route(self, flat: Tensor, batch: int, rows: Tensor, info: TokenInfo) -> TokenRouting:
        """Choose experts for tokens [batch · seq, dim] at `rows` of their sequences."""
        e, length = self.options, info.length
        logits = self.router(flat)  # [tokens, experts]
        scores = logits.softmax(1) if e.router == "softmax" else logits.sigmoid()
        with torch.no_grad():
            real = (rows < length).repeat(batch).unsqueeze(1)  # padding is not routed
            ranked = scores if self.bias is None else scores + self.bias
            asked = self.choose(ranked)
            if self.routing_override is not None:
                shown = ranked.view(batch, -1, e.count), asked.view(batch, -1, e.top_k)
                asked = self.routing_override(*shown, info.samples, rows).flatten(0, 1)
            asked = torch.where(real, asked, e.count)
            chosen = self._within_capacity(asked, batch, rows, length)
        weights = scores.gather(1, torch.where(real, asked, 0))
        if e.top_k > 1 if e.renormalize is None else e.renormalize:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
        weights = weights * e.scale * (chosen < e.count)
        if torch.is_grad_enabled():
            weights = self._balanced(weights, logits, scores, asked, chosen, batch, length)
        return TokenRouting(chosen, weights)

    def choose(self, ranked: Tensor) -> Tensor:
        """Indices of each token's experts [tokens, k] from scores [tokens, experts] with the bias, which affects only
        the choice, not the weights."""
        e = self.options
        if e.top_groups is not None and e.top_groups < e.groups:
            grouped = ranked.view(len(ranked), e.groups, -1)
            # a group scores as its best two experts (DeepSeek-V3 §2.1.2), or its best one (DeepSeek-V2 §2.2.2)
            best = min(2 if e.router == "sigmoid" else 1, grouped.shape[-1])
            strength = grouped.topk(best, dim=-1).values.sum(-1)
            allowed = torch.zeros_like(strength, dtype=torch.bool)
            allowed.scatter_(1, strength.topk(e.top_groups, dim=-1).indices, True)
            ranked = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
        return ranked.topk(e.top_k, dim=-1).indices

    def _within_capacity(self, asked: Tensor, batch: int, rows: Tensor, length: int) -> Tensor:
        """Drop the tokens of a sequence beyond an expert's capacity, in order, so that none depends on later ones."""
        e = self.options
        if e.capacity is None or not self.training:
            return asked
        room = -int(-e.capacity * length * e.top_k // e.count)
        every, places, mine = self.layout.whole(asked.view(batch, -1, e.top_k), rows)
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
        """The same weights, with a backward pass that counts the load and adds the auxiliary losses."""
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
                    over_even = self.layout.total(each.clone()).float() * (e.count / (e.top_k * length))
                over_even = over_even.expand(batch, -1).unsqueeze(1)
            aux = self.aux_weight * ((share * real).view(batch, -1, e.count) * over_even).sum()
        if e.z_weight:
            z = e.z_weight * (logits.logsumexp(1, keepdim=True).square() * real).sum()
        with torch.no_grad():
            nothing = torch.zeros((), device=weights.device)
            terms = [each.sum(0), dropped.view(1), *((nothing if t is None else t).view(1) for t in (aux, z))]
            seen = torch.cat([t.double() for t in terms])
        penalty = sum((t for t in (aux, z) if t is not None), start=torch.zeros((), device=weights.device))
        out: Tensor = _AddPenalty.apply(weights, penalty, self.unit, self.tally, seen)
        return out


def counts_by_row(ids: Tensor, count: int) -> Tensor:
    """How often each index below `count` occurs in each row, [rows, count]."""
    return (ids.unsqueeze(2) == torch.arange(count, device=ids.device)).sum(1)


class _AddPenalty(torch.autograd.Function):
    """The weights unchanged; the backward pass adds the gradient of a penalty and adds `seen` to a tally.

    The backward pass runs once per training microbatch, also with recompute, and never in evaluation.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, penalty: Tensor, unit: Tensor, tally: Tensor, seen: Tensor) -> Tensor:
        ctx.unit, ctx.tally, ctx.seen = unit, tally, seen
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.tally.add_(ctx.seen)
        return grads[0], ctx.unit.clone(), None, None, None
