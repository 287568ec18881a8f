"""A block's step as a tape of tensors that come and go: what it keeps for its backward pass, and its peaks on the way.

Each line below is a line of models/transformer.py and what autograd does with it; `weft dryrun` traces the real ones.
"""

from __future__ import annotations

from functools import partial

from weft.job.schema import Model
from weft.planner.memory.experts import Mixture, routed_backward, routed_forward
from weft.planner.memory.tape import (
    FP32_BYTES,
    Passing,
    Sizes,
    Tape,
    enter,
    into_region_backward,
    keeps_input,
    leave,
    norm,
    norm_backward,
    out_of_region_backward,
)  # fmt: skip


def block_passing(m: Model, z: Sizes, recompute: bool, mix: Mixture | None = None) -> Passing:
    """One block of a transformer; with experts, where `mix` says what this rank has of them."""
    tape = Tape()
    x = z.rows * z.dim * z.c
    tape.take(x=x)
    _block_forward(tape, m, z, mix)
    kept_all, forward = tape.live - x, tape.peak - x
    if not recompute:
        tape.take(dy=x)
        start, tape.peak = tape.live, tape.live
        _block_backward(tape, m, z, mix)
        return Passing(kept_all, forward, tape.peak - start, start - tape.noted)
    again = Tape()
    again.take(x=x, dy=x)
    _block_forward(again, m, z, mix)
    again.drop("out")
    if mix is None:
        again.peak = again.live  # the forward pass that runs again stops before its last product
    _block_backward(again, m, z, mix)
    return Passing(x, forward, again.peak - 3 * x, 3 * x - again.noted)


def _block_forward(t: Tape, m: Model, z: Sizes, mix: Mixture | None) -> None:
    norm(t, m, z, "x", "n", z.rows, z.dim, 1)
    enter(t, z, "n")
    t.take(q=z.tokens * z.heads * z.c, k=z.tokens * z.kv * z.c, v=z.tokens * z.kv * z.c)
    if m.qk_norm:
        for name, wide in (("q", z.heads), ("k", z.kv)):
            norm(t, m, z, name, f"{name}n", z.tokens * wide / (m.head_dim or 1), m.head_dim or 1, 1)
    q, k = ("qn", "kn") if m.qk_norm else ("q", "k")
    if m.positions == "rope":
        for name, wide in ((q, z.heads), (k, z.kv)):
            copy = FP32_BYTES if z.c < FP32_BYTES else 0
            t.flash(z.tokens * wide * (copy + 2.5 * FP32_BYTES))
            t.take(**{f"{name}r": z.tokens * wide * z.c})
        for name in (q, k):
            if not (m.qk_norm and z.fused):
                t.drop(name)
    t.take(y=z.tokens * z.heads * z.c, lse=z.tokens * z.scores * FP32_BYTES)
    leave(t, z, "o")
    t.drop("n0")
    t.take(x1=z.rows * z.dim * z.c)
    if not keeps_input(m, z):
        t.drop("x")
    t.drop("o")
    feed = _feed_forward if mix is None else partial(routed_forward, mix=mix)
    feed(t, m, z)


def _feed_forward(t: Tape, m: Model, z: Sizes) -> None:
    norm(t, m, z, "x1", "n2", z.rows, z.dim, 2)
    enter(t, z, "n2")
    hidden = z.tokens * z.ffn * z.c
    if m.activation == "swiglu":
        t.take(g=hidden, s=hidden, u=hidden, p=hidden)
    else:
        t.take(u=hidden, p=hidden)
    leave(t, z, "d")
    t.drop("n20")
    t.take(out=z.rows * z.dim * z.c)
    t.drop("d")
    if not keeps_input(m, z):
        t.drop("x1")


def _feed_backward(t: Tape, m: Model, z: Sizes) -> None:
    hidden, wide = z.tokens * z.ffn * z.c, z.tokens * z.dim * z.c
    matrix = z.dim * z.ffn * z.c
    t.drop("out")
    into_region_backward(t, z, "dd")
    t.take(dp=hidden)
    t.weigh(matrix, z.retain)
    t.drop("p", "dd")
    if m.activation == "swiglu":
        t.take(ds=hidden, du=hidden)
        t.drop("dp", "s", "u")
        t.take(dn=wide)
        t.weigh(matrix, z.retain)
        t.drop("du")
        t.take(dg=hidden)
        t.drop("ds", "g")
        t.take(dn2=wide)
        t.weigh(matrix, z.retain)
        t.drop("dg")
        t.flash(wide)
        t.drop("dn2", "n2")
    else:
        t.take(du=hidden)
        t.drop("dp", "u")
        t.take(dn=wide)
        t.weigh(matrix, z.retain)
        t.drop("du", "n2")
    out_of_region_backward(t, z, "dn")


def _block_backward(t: Tape, m: Model, z: Sizes, mix: Mixture | None) -> None:
    feed = _feed_backward if mix is None else partial(routed_backward, mix=mix)
    feed(t, m, z)
    wide = z.tokens * z.dim * z.c
    norm_backward(t, m, z, "n2", "dn", z.rows, z.dim)
    t.flash(z.rows * z.dim * z.c)
    t.drop("dn", "x1")
    into_region_backward(t, z, "do")
    heads, kv = z.tokens * z.heads * z.c, z.tokens * z.kv * z.c
    t.take(da=heads)
    t.weigh(z.dim * z.heads * z.c, z.retain)
    t.drop("do")
    t.take(dq=heads, dk=kv, dv=kv)
    q, k = ("qn", "kn") if m.qk_norm else ("q", "k")
    roped = m.positions == "rope"
    t.drop("da", "y", "lse", "v", f"{q}r" if roped else q, f"{k}r" if roped else k)
    if roped:
        copy = FP32_BYTES if z.c < FP32_BYTES else 0
        for width in (z.kv, z.heads):
            t.flash(z.tokens * width * (copy + 2.5 * FP32_BYTES))
    if m.qk_norm:
        for name, grad, width in (("kn", "dk", z.kv), ("qn", "dq", z.heads)):
            norm_backward(t, m, z, name, grad, z.tokens * width / (m.head_dim or 1), m.head_dim or 1)
    t.take(dn=wide)
    t.drop("dv")
    t.weigh(2 * z.dim * z.kv * z.c, z.retain)
    t.flash(wide)
    t.drop("dk")
    t.flash(2 * wide)
    t.weigh(z.dim * z.heads * z.c, z.retain)
    t.drop("dq", "n")
    out_of_region_backward(t, z, "dn")
    norm_backward(t, m, z, "n", "dn", z.rows, z.dim)
    t.flash(z.rows * z.dim * z.c)
    t.drop("dn", "weights")


def head_passing(m: Model, z: Sizes, vocab: float, targets: float, chunk: int) -> tuple[Passing, float]:
    """The last norm and the loss in chunks of logits; also the bytes of the head's gradient that its forward makes."""
    tape = Tape()
    x = z.rows * z.dim * z.c
    tape.take(x=x)
    norm(tape, m, z, "x", "n", z.rows, z.dim, 3)
    if not keeps_input(m, z):
        tape.drop("x")
    enter(tape, z, "n")
    chunks = max(1.0, -(-targets // max(1.0, chunk // max(1.0, vocab))))
    rows = -(-targets // chunks)
    one = rows * vocab
    weight = vocab * z.dim
    alone = chunks == 1  # then the product is the gradient, and no wider sum is made
    tape.take(dx=targets * z.dim * z.c, dw=0.0 if alone else weight * FP32_BYTES)
    mixed = z.c < FP32_BYTES
    before = one * z.c if targets > rows else 0.0  # the gradient of the chunk before is still there
    tape.flash(before + one * (2 * FP32_BYTES + (z.c if mixed else 0)))
    if alone:
        tape.flash(one * z.c + weight * z.c)
        tape.drop("dw")
        tape.take(dw=weight * z.c)
    elif mixed:
        tape.flash(one * z.c + weight * z.c)
        tape.flash(weight * z.c)
        tape.drop("dw")
        tape.take(dw=weight * z.c)
    tape.drop("n", "n0")
    kept, forward = tape.live - x, tape.peak - x
    start = tape.peak = tape.live
    tape.drop("dw")  # counted with the weights' gradients from here on
    tape.take(dn=0.0)
    if m.is_classifier:
        tape.drop("dx")
        tape.take(dx=z.tokens * z.dim * z.c)
    out_of_region_backward(tape, z, "dx")
    norm_backward(tape, m, z, "n", "dx", z.rows, z.dim)
    return Passing(kept, forward, tape.peak - start), weight * z.c
