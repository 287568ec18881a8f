"""Bytes of a mixture-of-experts layer through its passes.

Each line follows a line of models/experts/ or parallel/expert/expert_parallel.py. Load is taken as even: a rank that is
sent more than its share holds more.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.job.schema import Experts, Model
from weft.planner.memory.live_bytes import FP32_BYTES, LiveBytes, Sizes, keeps_input, norm
from weft.planner.model.model_facts import Size

INDEX_BYTES = 8
"""Bytes of an index."""


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts on this rank, for one microbatch."""

    experts: Experts
    tokens: Size
    """Tokens that this rank routes."""
    ffn: int
    own: Size
    """Experts of this rank."""
    ep: bool
    cut: bool
    """Whether every rank of tp has all tokens and routes a part of them."""
    shared: Size
    """Width of the shared experts on this rank."""
    apart: bool
    """Whether experts are sharded as a unit of their own, whose gradients are reduced as soon as they are complete."""
    guests: int = 0
    """Experts of other ranks that this rank may compute after rebalancing."""

    @property
    def uses(self) -> Size:
        return self.tokens * self.experts.top_k


def routed_forward(t: LiveBytes, m: Model, z: Sizes, mix: Mixture) -> None:
    """From the residual stream x1 to the block's output."""
    norm(t, m, z, "n2", z.rows, z.dim)
    token, x, h = mix.tokens * z.dim * z.c, mix.uses * z.dim * z.c, mix.uses * mix.ffn * z.c
    if mix.cut:
        t.take(part=token)
    _route(t, z, mix)
    copies = 1 if z.fused else 2  # a CPU puts together what each expert's product gives
    t.flash(x + mix.uses * INDEX_BYTES)
    t.take(sent=x)
    if mix.ep:
        t.take(arrived=x, trip=2 * mix.uses * INDEX_BYTES)
        _shared_forward(t, m, z, mix)
        t.take(rows=x, lent=_lent(m, z, mix))
    t.flash(copies * h)
    t.take(u=h)
    if m.gated:
        t.flash(copies * h)
        t.take(g=h, s=h)
    t.take(p=h)
    t.flash(copies * x)
    t.take(made=x)
    if mix.ep:
        t.take(turned=x)
        t.drop("made")
        t.take(back=x)
        t.drop("turned", "arrived")
    else:
        t.drop("made")
        t.take(back=x)
        _shared_forward(t, m, z, mix)
    t.flash(x + token)
    t.take(mixed=token)
    if mix.ep:
        t.drop("sent")
    if mix.cut:
        t.flash(2 * z.tokens * z.dim * z.c)
        t.take(joined=z.rows * z.dim * z.c)
        t.drop("mixed")
    out = z.rows * z.dim * z.c
    if mix.experts.shared:
        t.take(sum=out)
        t.drop("mixed", "joined", "always")
    t.take(out=out)
    t.drop("mixed", "joined", "sum")
    if not keeps_input(m, z):
        t.drop("x1")
    if not mix.experts.shared and (mix.cut or z.c < FP32_BYTES):  # nobody else has kept it
        t.drop("n2")
    if z.c < FP32_BYTES:
        t.drop("part")


def _lent(m: Model, z: Sizes, mix: Mixture) -> Size:
    """Bytes of the guests' matrices."""
    return mix.guests * (3 if m.gated else 2) * z.dim * mix.ffn * z.c


def _route(t: LiveBytes, z: Sizes, mix: Mixture) -> None:
    """The router in fp32, and who goes where."""
    e = mix.experts
    scores = mix.tokens * e.count * FP32_BYTES
    if z.c < FP32_BYTES:
        t.take(wide=mix.tokens * z.dim * FP32_BYTES, matrix=e.count * z.dim * FP32_BYTES)
    t.take(logits=scores, scores=scores)
    if e.balance == "bias":
        t.take(ranked=scores)
    t.flash(mix.uses * e.count + 2 * scores)
    # which score, its value, whether it counts, its share, the weight as the experts' results are multiplied by it
    t.take(choice=mix.uses * (INDEX_BYTES + FP32_BYTES + 1 + FP32_BYTES + z.c))
    if not e.z_weight:
        t.drop("logits")
    t.drop("ranked")
    t.take(order=2 * mix.uses * INDEX_BYTES)
    t.flash(3 * mix.uses * INDEX_BYTES)


def _shared_forward(t: LiveBytes, m: Model, z: Sizes, mix: Mixture) -> None:
    """The experts that all tokens use: a feed-forward part of its own, cut over tp."""
    if not mix.experts.shared:
        return
    hidden, wide = z.tokens * mix.shared * z.c, z.tokens * z.dim * z.c
    if z.tp and z.sequence:
        t.flash(2 * wide)
        t.take(all=wide)
    t.take(su=hidden, sp=hidden)
    if m.gated:
        t.take(sg=hidden, ss=hidden)
    t.flash(wide * (2 if z.tp else 1))
    t.take(always=z.rows * z.dim * z.c)


def _shared_backward(t: LiveBytes, m: Model, z: Sizes, mix: Mixture) -> None:
    if not mix.experts.shared:
        return
    hidden, wide, matrix = z.tokens * mix.shared * z.c, z.tokens * z.dim * z.c, mix.shared * z.dim * z.c
    if z.tp and z.sequence:
        t.flash(2 * wide)
        t.take(sd=wide)
    t.take(sdp=hidden)
    t.weight_gradient(matrix, z.retain)
    t.drop("sp", "sd")
    if m.gated:
        t.take(sdg=2 * hidden)
        t.drop("sdp", "ss", "sg")
        t.take(sdn=2 * wide)
        t.weight_gradient(2 * matrix, z.retain)
    else:
        t.take(sdg=hidden)
        t.drop("sdp")
        t.take(sdn=wide)
        t.weight_gradient(matrix, z.retain)
    t.drop("su", "sdg", "all", "sdn")
    if z.tp:
        t.flash(wide + z.rows * z.dim * z.c)
    t.take(sdn=z.rows * z.dim * z.c)


def routed_backward(t: LiveBytes, m: Model, z: Sizes, mix: Mixture) -> None:
    """From the gradient of the block's output to that of the norm's, dn."""
    token, x, h = mix.tokens * z.dim * z.c, mix.uses * z.dim * z.c, mix.uses * mix.ffn * z.c
    matrix = mix.own * z.dim * mix.ffn * z.c
    before = t.held.get("weights", 0.0)
    t.drop("out")
    if mix.cut:
        t.take(dpart=token)
    t.take(dback=x)
    t.flash(x)
    t.drop("back", "dpart")
    if mix.ep:
        t.take(dturned=x)
        t.drop("dback")
        t.take(dmade=x)
        t.drop("dturned")
    else:
        _shared_backward(t, m, z, mix)
    t.take(dp=h)
    t.weight_gradient(matrix, z.retain)
    t.drop("p", "dback", "dmade")
    if m.gated:
        t.take(ds=h, du=h)
        t.drop("dp", "s")
        t.take(dg=h)
        t.drop("ds", "g", "u")
        t.take(dx=x)
        t.weight_gradient(matrix, z.retain)
        t.drop("dg")
        t.take(dx2=x)
        t.weight_gradient(matrix, z.retain)
        t.drop("du")
        t.flash(x)
        t.drop("dx2")
    else:
        t.take(du=h)
        t.drop("dp", "u")
        t.take(dx=x)
        t.weight_gradient(matrix, z.retain)
        t.drop("du")
    t.drop("rows" if mix.ep else "sent")
    if mix.apart:
        t.drop("weights")
        t.take(weights=before)
        t.at_expert_gradients = t.live
    if mix.ep:
        t.flash(2 * _lent(m, z, mix))
        t.drop("lent")
        t.take(darrived=x)
        t.drop("dx")
        t.take(dsent=x)
        _shared_backward(t, m, z, mix)
        t.drop("darrived", "trip", "dsent")
        t.take(dx=x)
    t.flash(x)
    t.take(dn=token)
    t.drop("dx")
    scores = mix.tokens * mix.experts.count * FP32_BYTES
    t.flash(3 * scores + (token * (1 + FP32_BYTES / z.c) if z.c < FP32_BYTES else token))
    t.drop("scores", "logits", "choice", "order", "wide", "matrix", "part")
    if mix.cut:
        t.flash(2 * z.tokens * z.dim * z.c)
        t.drop("dn")
        t.take(dn=z.rows * z.dim * z.c)
    if mix.experts.shared:
        t.flash(z.rows * z.dim * z.c)
        t.drop("sdn")
    t.drop("n2")
