"""Bytes of a transformer block: what is kept for the backward pass, and the peaks of both passes.

Each line follows a line of models/transformer.py and what autograd does with it; `weft dryrun` traces the real ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from weft.job.schema import Latent, Model
from weft.planner.memory.expert_trace import Mixture, routed_backward, routed_forward
from weft.planner.memory.live_bytes import (
    CODED_BYTES,
    FP32_BYTES,
    LiveBytes,
    PassBytes,
    Sizes,
    enter,
    into_region_backward,
    keeps_input,
    leave,
    norm,
    norm_backward,
    norm_gradient,
    out_of_region_backward,
)  # fmt: skip
from weft.planner.model.model_facts import Size

NOISE_BYTES = 8
"""Bytes of a random number that decides whether an element is dropped."""


class BlockBytes(NamedTuple):
    """One block under each kind of recompute, in the order of RECOMPUTES."""

    none: PassBytes
    selective: PassBytes
    full: PassBytes


def block_bytes(m: Model, z: Sizes, mix: Mixture | None = None) -> BlockBytes:
    """One block of a transformer; with experts where `mix` is given."""
    x = z.rows * z.dim * z.c
    tape = LiveBytes(frozen=m.lora is not None)
    tape.take(x=x)
    _block_forward(tape, m, z, mix)
    kept, exact = tape.live - x, tape.peak - x
    whole, forward, decoded = kept, exact, 0.0 * x
    if z.coded:
        # other tensors are freed as the forward pass goes on: the factors of a gated product, or its input, are there
        working, largest = tape.encode(x, z.c, 2 if m.gated else 1, exact)
        kept = tape.live - x * CODED_BYTES / z.c
        forward, decoded = kept + working, 2 * largest
    tape.take(dy=x)
    start = tape.peak = tape.live
    _block_backward(tape, m, z, mix)
    none = PassBytes(kept, forward, tape.peak - start + decoded, start - tape.at_expert_gradients)
    again = LiveBytes(frozen=m.lora is not None)
    again.take(x=x, dy=x)
    _block_forward(again, m, z, mix)
    again.drop("out")
    if mix is None and m.ends_with_product:
        again.peak = again.live  # the forward pass that runs again stops before its last product
    _block_backward(again, m, z, mix)
    inner = 3 * x - again.at_expert_gradients
    some = selective_kept(m, z, mix)
    if m.lora is None:
        some = np.minimum(some, whole)
    selective = PassBytes(some, forward, again.peak - 2 * x - some, inner + some - x)
    full = PassBytes(x, exact, again.peak - 3 * x, inner)
    return BlockBytes(none, selective, coded_pass(full, z, x) if z.coded else full)


def with_split_pass(block: BlockBytes, m: Model, z: Sizes, mix: Mixture | None, traced: bool) -> BlockBytes:
    """The same with a backward pass in two halves: the first keeps the gradients of what products, sums and norms
    give, from which the second makes those of weights. `traced` where operators run one by one."""
    gates, attentions = 2 if m.gated else 1, 2 if z.cross else 1
    wide = z.ffn if mix is None else (mix.uses * mix.ffn + z.tokens * mix.shared) / z.tokens
    sums = attentions + (not m.parallel_residual)
    norms = (attentions + 1) * (2 if m.norm_at == "both" else 1)
    later = z.tokens * z.c * (attentions * (z.heads + 2 * z.kv) + gates * wide) + sums * z.rows * z.dim * z.c
    later = later + norm_gradient(m, z, norms * z.rows * z.dim + bool(m.qk_norm) * z.tokens * (z.heads + z.kv))
    later = later + z.learned.kept  # gradients of scores
    back = block.none.backward
    if traced and not z.coded:
        back = np.maximum(back, _input_pass(m, z, mix))
    some, full = (replace(p, input_pass=p.backward) for p in (block.selective, block.full))
    return BlockBytes(replace(block.none, later=later, input_pass=back), some, full)


def _input_pass(m: Model, z: Sizes, mix: Mixture | None) -> Size:
    """The peak of a backward pass that keeps all for the gradients of weights, and computes none of them."""
    x = z.rows * z.dim * z.c
    tape = LiveBytes(frozen=m.lora is not None)
    tape.take(x=x)
    _block_forward(tape, m, z, mix)
    tape.take(dy=x)
    start = tape.peak = tape.live
    tape.frozen, tape.retained = True, frozenset(tape.held) - {"dy"}
    _block_backward(tape, m, z, mix)
    return tape.peak - start


def coded_pass(p: PassBytes, z: Sizes, whole: Size) -> PassBytes:
    """A pass that stores what it keeps in fp8, from bytes in the compute dtype, and decodes all of it at once."""
    kept = p.kept * CODED_BYTES / z.c
    return replace(p, kept=kept, forward=p.forward + kept, backward=p.backward + whole)


def selective_kept(m: Model, z: Sizes, mix: Mixture | None) -> Size:
    """The input and the outputs of matrix products and attention: what selective recompute keeps."""
    gates = 2 if m.gated else 1
    attention = z.tokens * (2 * z.heads + 2 * z.kv) * z.c + z.tokens * z.scores * FP32_BYTES
    if z.cross:
        attention = 2 * attention + z.tokens * z.dim * z.c
    if m.lora is not None and mix is None:  # the products of adapters
        width = {"q": z.heads, "k": z.kv, "v": z.kv, "o": z.dim, "gate": z.ffn, "up": z.ffn, "down": z.dim}
        made = (size for name, size in width.items() if (m.gated or name != "gate") and m.lora.applies_to(name, False))
        attention = attention + z.tokens * sum(size + m.lora.rank for size in made) * z.c
    if mix is None:
        hidden = z.tokens * gates * z.ffn * z.c
    else:
        hidden = (mix.uses * (gates * mix.ffn + z.dim) + z.tokens * gates * mix.shared) * z.c
    return (z.rows + 2 * z.tokens) * z.dim * z.c + attention + hidden  # products are kept before tp cuts their sums


def _block_forward(t: LiveBytes, m: Model, z: Sizes, mix: Mixture | None) -> None:
    norm(t, m, z, "n", z.rows, z.dim)
    enter(t, z, "n")
    if m.latent is not None:
        _latents(t, m, z, m.latent)
    t.take(q=z.tokens * z.heads * z.c, k=z.tokens * z.kv * z.c, v=z.tokens * z.kv * z.c)
    if m.qk_norm:
        for name, wide in (("q", z.heads), ("k", z.kv)):
            norm(t, m, z, f"{name}n", z.tokens * wide / (m.head_dim or 1), m.head_dim or 1)
    q, k = ("qn", "kn") if m.qk_norm else ("q", "k")
    if m.positions == "rope":
        for name, wide in ((q, z.heads), (k, z.kv)):
            copy = FP32_BYTES if z.c < FP32_BYTES else 0
            t.flash(z.tokens * wide * (copy + 2.5 * FP32_BYTES))
            t.take(**{f"{name}r": z.tokens * wide * z.c})
        for name in (q, k):
            if not (m.qk_norm and z.fused):
                t.drop(name)
    t.flash(attention_bytes(z, 1, 2, (FP32_BYTES + z.c / 2) * z.heads + 4 * z.c * z.kv))
    t.flash(z.learned.forward)
    t.take(y=z.tokens * z.heads * z.c, lse=z.tokens * z.scores * FP32_BYTES)
    t.take(soft=z.learned.kept, operands=z.learned.operands)
    leave(t, z, "o")
    t.drop("n0")
    _before_sum(t, m, z, "o", "on")
    t.take(x1=z.rows * z.dim * z.c)
    if not keeps_input(m, z):
        t.drop("x")
    t.drop("o")
    if z.cross:
        _cross_forward(t, m, z)
    feed = _feed_forward if mix is None else partial(routed_forward, mix=mix)
    feed(t, m, z)
    if m.parallel_residual:  # the norms have read x
        t.drop("x1")


def _cross_forward(t: LiveBytes, m: Model, z: Sizes) -> None:
    """Attention to the encoder's output, which is kept outside the block."""
    norm(t, m, z, "nc", z.rows, z.dim)
    enter(t, z, "nc")
    if z.sequence:  # the encoder's output is gathered in each block
        t.take(memory=z.tokens * z.dim * z.c)
    keys = z.tokens * z.kv * z.c * z.gathered
    t.take(qc=z.tokens * z.heads * z.c, kc=keys, vc=keys)
    t.take(yc=z.tokens * z.heads * z.c, lsec=z.tokens * z.scores * FP32_BYTES)
    leave(t, z, "oc")
    t.drop("nc0")
    t.take(x2=z.rows * z.dim * z.c)
    if not keeps_input(m, z):
        t.drop("x1")
    t.drop("oc")


def _cross_backward(t: LiveBytes, m: Model, z: Sizes) -> None:
    heads, kv, wide = z.tokens * z.heads * z.c, z.tokens * z.kv * z.c, z.tokens * z.dim * z.c
    into_region_backward(t, z, "do")
    t.take(da=heads)
    t.weight_gradient(z.dim * z.heads * z.c, z.retain)
    t.drop("do")
    t.take(dq=heads, dk=kv, dv=kv)
    t.drop("da", "yc", "lsec", "vc", "kc", "qc")
    t.flash(2 * wide)
    t.weight_gradient(2 * z.dim * z.kv * z.c, z.retain)
    t.drop("dk", "dv", "memory")
    t.take(dn=wide)
    t.weight_gradient(z.dim * z.heads * z.c, z.retain)
    t.drop("dq", "nc")
    out_of_region_backward(t, z, "dn")
    norm_backward(t, m, z, "nc", "dn", z.rows, z.dim)
    t.flash(z.rows * z.dim * z.c)
    t.drop("dn", "x2")


def _latents(t: LiveBytes, m: Model, z: Sizes, latent: Latent) -> None:
    """The normalised vectors from which queries, keys and values are expanded, and the values that the output reads."""
    for name, rank in (("qa", latent.q_rank), ("kva", latent.kv_rank)):
        if rank:
            norm(t, m, z, name, z.tokens, rank)
            if keeps_input(m, z):
                t.take(**{f"{name}_x": z.tokens * rank * z.c})
    if latent.v_dim < (m.head_dim or 0):
        t.take(cut=z.tokens * z.scores * latent.v_dim * z.c)


def attention_bytes(z: Sizes, queries: int, keys: int, exchanged: Size) -> Size:
    """Temporary bytes of attention: two tiles of scores, those held of the tile before (gradients too in the backward
    pass, of three queries) and so many copies in fp32 without a fused kernel, and what is exchanged for each token."""
    copies = (z.tile > 0) * (z.c < FP32_BYTES) * FP32_BYTES * (queries * z.heads + keys * z.kv)
    return (2 + z.tiled * (queries + 1) / 2) * z.tile + z.tokens * (copies + z.exchanged * exchanged)


MORE_HIDDEN = {"swiglu_clamped": 3, "quick_gelu": 1, "relu": -1}
"""Hidden tensors that an activation keeps besides its input and output; ReLU keeps only the latter."""


def _before_sum(t: LiveBytes, m: Model, z: Sizes, name: str, normed: str) -> None:
    """A norm of what is added to the residual stream, where inputs have norms too, and dropout."""
    size = z.rows * z.dim
    if m.norm_at == "both":
        norm(t, m, z, normed, z.rows, z.dim)
        t.drop(normed)
        if keeps_input(m, z):
            t.take(**{f"{normed}_x": size * z.c})
    if m.dropout:
        t.flash(4 * NOISE_BYTES * size)
        t.take(**{f"{name}_mask": size})


def _before_sum_backward(t: LiveBytes, m: Model, z: Sizes, name: str, normed: str) -> None:
    if m.dropout:
        t.flash(z.rows * z.dim * z.c)
        t.drop(f"{name}_mask")
    if m.norm_at == "both":
        t.take(dadded=z.rows * z.dim * z.c)
        norm_backward(t, m, z, normed, "dadded", z.rows, z.dim)
        t.drop(f"{normed}_x")


def _feed_forward(t: LiveBytes, m: Model, z: Sizes) -> None:
    norm(t, m, z, "n2", z.rows, z.dim)
    enter(t, z, "n2")
    hidden = z.tokens * z.ffn * z.c
    if m.gated:
        t.take(g=hidden, s=hidden, u=hidden, p=hidden)
    else:
        t.take(u=hidden, p=hidden)
    if (more := MORE_HIDDEN.get(m.activation or "", 0)) > 0:
        t.take(more=more * hidden)
    elif more:
        t.drop("u")
    leave(t, z, "d")
    t.drop("n20")
    _before_sum(t, m, z, "d", "dn_")
    t.take(out=z.rows * z.dim * z.c)
    t.drop("d")
    if not keeps_input(m, z):
        t.drop("x1")


def _feed_backward(t: LiveBytes, m: Model, z: Sizes) -> None:
    hidden, wide = z.tokens * z.ffn * z.c, z.tokens * z.dim * z.c
    matrix = z.dim * z.ffn * z.c
    t.drop("out")
    _before_sum_backward(t, m, z, "d", "dn_")
    into_region_backward(t, z, "dd")
    t.take(dp=hidden)
    t.weight_gradient(matrix, z.retain)
    t.drop("p", "dd", "dadded")
    if m.gated:
        t.take(ds=hidden, du=hidden)
        t.drop("dp", "s", "u", "more")
        t.take(dn=wide)
        t.weight_gradient(matrix, z.retain)
        t.drop("du")
        t.take(dg=hidden)
        t.drop("ds", "g")
        t.take(dn2=wide)
        t.weight_gradient(matrix, z.retain)
        t.drop("dg")
        t.flash(wide)
        t.drop("dn2", "n2")
    else:
        t.take(du=hidden)
        t.drop("dp", "u", "more")
        t.take(dn=wide)
        t.weight_gradient(matrix, z.retain)
        t.drop("du", "n2")
    out_of_region_backward(t, z, "dn")


def _block_backward(t: LiveBytes, m: Model, z: Sizes, mix: Mixture | None) -> None:
    feed = _feed_backward if mix is None else partial(routed_backward, mix=mix)
    feed(t, m, z)
    wide = z.tokens * z.dim * z.c
    norm_backward(t, m, z, "n2", "dn", z.rows, z.dim)
    t.flash(z.rows * z.dim * z.c)
    t.drop("dn")
    if m.parallel_residual:  # waits for the gradient by attention
        t.take(dskip=z.rows * z.dim * z.c)
    if z.cross:
        _cross_backward(t, m, z)
    t.drop("x1")
    _before_sum_backward(t, m, z, "o", "on")
    into_region_backward(t, z, "do")
    heads, kv = z.tokens * z.heads * z.c, z.tokens * z.kv * z.c
    t.take(da=heads)
    t.weight_gradient(z.dim * z.heads * z.c, z.retain)
    t.drop("do", "dadded")
    mixed = z.c < FP32_BYTES  # copies in fp32
    exchanged = (FP32_BYTES + z.c / 2) * z.heads + (4 * FP32_BYTES + 4 * z.c) * z.kv
    at_once = (FP32_BYTES + z.c / 2 + 6 * mixed) * z.heads + (FP32_BYTES + 4 * mixed) * z.kv
    t.flash(attention_bytes(z, 3, 4, exchanged + z.one_chunk * at_once))
    t.flash(z.learned.backward)
    t.take(dq=heads, dk=kv, dv=kv)
    q, k = ("qn", "kn") if m.qk_norm else ("q", "k")
    roped = m.positions == "rope"
    t.drop("da", "y", "lse", "soft", "operands", "v", f"{q}r" if roped else q, f"{k}r" if roped else k)
    if roped:
        copy = FP32_BYTES if z.c < FP32_BYTES else 0
        for width in (z.kv, z.heads):
            t.flash(z.tokens * width * (copy + 2.5 * FP32_BYTES))
    if m.qk_norm:
        for name, grad, width in (("kn", "dk", z.kv), ("qn", "dq", z.heads)):
            norm_backward(t, m, z, name, grad, z.tokens * width / (m.head_dim or 1), m.head_dim or 1)
    t.take(dn=wide)
    t.drop("dv", *(f"{name}{end}" for name in ("qa", "kva") for end in ("", "_f", "_r", "_y", "_stats", "_x")), "cut")
    t.weight_gradient(2 * z.dim * z.kv * z.c, z.retain)
    t.flash(wide)
    t.drop("dk")
    t.flash(2 * wide)
    t.weight_gradient(z.dim * z.heads * z.c, z.retain)
    t.drop("dq", "n")
    out_of_region_backward(t, z, "dn")
    norm_backward(t, m, z, "n", "dn", z.rows, z.dim)
    t.flash(z.rows * z.dim * z.c)
    t.drop("dn", "dskip", "weights")
