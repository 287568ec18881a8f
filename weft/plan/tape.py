"""A block's step as a tape of tensors that come and go: what it keeps for its backward pass, and its peaks on the way.

Each line below is a line of models/transformer.py and what autograd does with it; `weft dryrun` traces the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.job.schema import Model

FLOAT = 4


@dataclass
class Tape:
    """Live bytes by name, and the most there ever were."""

    held: dict[str, float] = field(default_factory=dict)
    live: float = 0.0
    peak: float = 0.0

    def take(self, **sizes: float) -> None:
        for name, size in sizes.items():
            self.held[name] = self.held.get(name, 0.0) + size
            self.live += size
            self.peak = max(self.peak, self.live)

    def drop(self, *names: str) -> None:
        for name in names:
            self.live -= self.held.pop(name, 0.0)

    def flash(self, size: float) -> None:
        """Bytes that are there for a moment."""
        self.peak = max(self.peak, self.live + size)

    def weigh(self, size: float, retain: bool) -> None:
        """The gradient of a weight: handed on at once, or kept with the others of its unit."""
        if retain:
            self.take(weights=size)
        else:
            self.flash(size)


@dataclass(frozen=True)
class Sizes:
    """Elements on this rank for one microbatch, and bytes of one."""

    rows: float
    """Tokens that norms and residuals see: cut along the sequence where tp does so."""
    tokens: float
    """Tokens that matrices see."""
    dim: int
    heads: float
    """Width of all queries of this rank."""
    kv: float
    scores: float
    """Heads of this rank."""
    ffn: float
    c: int
    """Bytes of an element."""
    tp: int
    sequence: bool
    retain: bool
    """The gradients of a unit's weights stay until all of them are there."""
    fused: bool
    """One kernel for a norm (GPUs); a CPU's RMS norm is made of several, in fp32."""


@dataclass(frozen=True)
class Passing:
    """Bytes of one unit for one microbatch, above what was there when the pass began.

    Forward begins with the unit's input, backward with all it kept and the gradient of its output.
    """

    kept: float
    """Between its forward and its backward, its output among it (the next unit's input)."""
    forward: float
    backward: float


def block_passing(m: Model, z: Sizes, recompute: bool) -> Passing:
    """One block of a transformer."""
    tape = Tape()
    x = z.rows * z.dim * z.c
    tape.take(x=x)
    _block_forward(tape, m, z)
    kept_all, forward = tape.live - x, tape.peak - x
    if not recompute:
        tape.take(dy=x)
        start, tape.peak = tape.live, tape.live
        _block_backward(tape, m, z)
        return Passing(kept_all, forward, tape.peak - start)
    again = Tape()
    again.take(x=x)
    _block_forward(again, m, z)
    again.drop("out")
    again.take(dy=x)
    again.peak = again.live  # the forward pass that runs again stops before its last product
    _block_backward(again, m, z)
    return Passing(x, forward, again.peak - 3 * x)


def _block_forward(t: Tape, m: Model, z: Sizes) -> None:
    _norm(t, m, z, "x", "n", z.rows, z.dim, 1)
    _enter(t, z, "n")
    t.take(q=z.tokens * z.heads * z.c, k=z.tokens * z.kv * z.c, v=z.tokens * z.kv * z.c)
    if m.qk_norm:
        for name, wide in (("q", z.heads), ("k", z.kv)):
            _norm(t, m, z, name, f"{name}n", z.tokens * wide / (m.head_dim or 1), m.head_dim or 1, 1)
    q, k = ("qn", "kn") if m.qk_norm else ("q", "k")
    if m.positions == "rope":
        for name, wide in ((q, z.heads), (k, z.kv)):
            copy = FLOAT if z.c < FLOAT else 0
            t.flash(z.tokens * wide * (copy + 2.5 * FLOAT))
            t.take(**{f"{name}r": z.tokens * wide * z.c})
        for name in (q, k):
            if not (m.qk_norm and z.fused):
                t.drop(name)
    t.take(y=z.tokens * z.heads * z.c, lse=z.tokens * z.scores * FLOAT)
    _leave(t, z, "o")
    t.drop("n0")
    t.take(x1=z.rows * z.dim * z.c)
    if not _keeps_input(m, z):
        t.drop("x")
    t.drop("o")
    _norm(t, m, z, "x1", "n2", z.rows, z.dim, 2)
    _enter(t, z, "n2")
    hidden = z.tokens * z.ffn * z.c
    if m.activation == "swiglu":
        t.take(g=hidden, s=hidden, u=hidden, p=hidden)
    else:
        t.take(u=hidden, p=hidden)
    _leave(t, z, "d")
    t.drop("n20")
    t.take(out=z.rows * z.dim * z.c)
    t.drop("d")
    if not _keeps_input(m, z):
        t.drop("x1")


def _keeps_input(m: Model, z: Sizes) -> bool:
    """Whether a norm saves its input as it is; a CPU's RMS norm in bf16 saves a copy in fp32 instead."""
    return z.fused or m.norm == "layernorm" or z.c == FLOAT


def _norm(t: Tape, m: Model, z: Sizes, into: str, out: str, rows: float, width: int, number: int) -> None:
    size = rows * width
    if m.norm == "layernorm" or z.fused:
        t.take(**{f"{out}_stats": rows * FLOAT * (2 if m.norm == "layernorm" else 1), out: size * z.c})
        return
    if z.c < FLOAT:
        t.take(**{f"{out}_f": size * FLOAT})
    t.flash(size * FLOAT + 2 * rows * FLOAT)
    t.take(**{f"{out}_r": rows * FLOAT, f"{out}_y": size * FLOAT})
    if z.c < FLOAT:
        t.flash(size * (FLOAT + z.c))
    t.take(**{out: size * z.c})


def _norm_backward(t: Tape, m: Model, z: Sizes, out: str, grad: str, rows: float, width: int) -> None:
    """From the gradient `grad` of the norm's output, which is there, to that of its input under the same name."""
    size = rows * width
    if m.norm == "layernorm" or z.fused:
        t.flash(size * z.c)
        t.drop(f"{out}_stats")
        return
    wide = size * FLOAT
    if z.c < FLOAT:
        t.take(_f=wide)
        t.drop(grad)
    # gradient, its products with the weight and with y, then those of the input's two ways
    t.flash(2 * wide)
    t.take(_g=wide)
    t.drop(f"{out}_y", "_f") if z.c < FLOAT else t.drop(f"{out}_y", grad)
    t.flash(4 * wide)
    t.drop(f"{out}_f", f"{out}_r")
    t.drop("_g")
    t.take(**{grad: size * z.c})


def _enter(t: Tape, z: Sizes, name: str) -> None:
    """Into a region of cut matrices; the piece that was gathered stays with its caller for a while."""
    if z.tp > 1 and z.sequence:
        piece = t.held[name]
        t.drop(name)
        whole = z.tokens * z.dim * z.c
        t.take(**{f"{name}0": piece})
        t.flash(2 * whole)
        t.take(**{name: whole})


def _leave(t: Tape, z: Sizes, name: str) -> None:
    whole = z.tokens * z.dim * z.c
    if z.tp == 1:
        t.take(**{name: whole})
    elif z.sequence:
        t.flash(2 * whole + z.rows * z.dim * z.c)
        t.take(**{name: z.rows * z.dim * z.c})
    else:
        t.flash(2 * whole)
        t.take(**{name: whole})


def _into_region_backward(t: Tape, z: Sizes, grad: str) -> None:
    """The gradient of a region's output, whole; under sequence parallelism it is gathered."""
    if z.tp > 1 and z.sequence:
        whole = z.tokens * z.dim * z.c
        t.flash(2 * whole)
        t.take(**{grad: whole})


def _out_of_region_backward(t: Tape, z: Sizes, grad: str) -> None:
    whole, piece = z.tokens * z.dim * z.c, z.rows * z.dim * z.c
    if z.tp > 1:
        t.flash(whole + (piece if z.sequence else 0))
    if z.tp > 1 and z.sequence:
        t.drop(grad)
        t.take(**{grad: piece})


def _block_backward(t: Tape, m: Model, z: Sizes) -> None:
    hidden, wide = z.tokens * z.ffn * z.c, z.tokens * z.dim * z.c
    matrix = z.dim * z.ffn * z.c
    t.drop("out")
    _into_region_backward(t, z, "dd")
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
    _out_of_region_backward(t, z, "dn")
    _norm_backward(t, m, z, "n2", "dn", z.rows, z.dim)
    t.flash(z.rows * z.dim * z.c)
    t.drop("dn", "x1")
    _into_region_backward(t, z, "do")
    heads, kv = z.tokens * z.heads * z.c, z.tokens * z.kv * z.c
    t.take(da=heads)
    t.weigh(z.dim * z.heads * z.c, z.retain)
    t.drop("do")
    t.take(dq=heads, dk=kv, dv=kv)
    q, k = ("qn", "kn") if m.qk_norm else ("q", "k")
    roped = m.positions == "rope"
    t.drop("da", "y", "lse", "v", f"{q}r" if roped else q, f"{k}r" if roped else k)
    if roped:
        copy = FLOAT if z.c < FLOAT else 0
        for width in (z.kv, z.heads):
            t.flash(z.tokens * width * (copy + 2.5 * FLOAT))
    if m.qk_norm:
        for name, grad, width in (("kn", "dk", z.kv), ("qn", "dq", z.heads)):
            _norm_backward(t, m, z, name, grad, z.tokens * width / (m.head_dim or 1), m.head_dim or 1)
    t.take(dn=wide)
    t.drop("dv")
    t.weigh(2 * z.dim * z.kv * z.c, z.retain)
    t.flash(wide)
    t.drop("dk")
    t.flash(2 * wide)
    t.weigh(z.dim * z.heads * z.c, z.retain)
    t.drop("dq", "n")
    _out_of_region_backward(t, z, "dn")
    _norm_backward(t, m, z, "n", "dn", z.rows, z.dim)
    t.flash(z.rows * z.dim * z.c)
    t.drop("dn", "weights")


def head_passing(m: Model, z: Sizes, vocab: float, targets: float, chunk: int) -> tuple[Passing, float]:
    """The last norm and the loss in chunks of logits; also the bytes of the head's gradient that its forward makes."""
    tape = Tape()
    x = z.rows * z.dim * z.c
    tape.take(x=x)
    _norm(tape, m, z, "x", "n", z.rows, z.dim, 3)
    if not _keeps_input(m, z):
        tape.drop("x")
    _enter(tape, z, "n")
    chunks = max(1.0, -(-targets // max(1.0, chunk // max(1.0, vocab))))
    rows = -(-targets // chunks)
    one = rows * vocab
    weight = vocab * z.dim
    alone = chunks == 1  # then the product is the gradient, and no wider sum is made
    tape.take(dx=targets * z.dim * z.c, dw=0.0 if alone else weight * FLOAT)
    mixed = z.c < FLOAT
    before = one * z.c if targets > rows else 0.0  # the gradient of the chunk before is still there
    tape.flash(before + one * (2 * FLOAT + (z.c if mixed else 0)))
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
    if m.family == "vit":
        tape.drop("dx")
        tape.take(dx=z.tokens * z.dim * z.c)
    _out_of_region_backward(tape, z, "dx")
    _norm_backward(tape, m, z, "n", "dx", z.rows, z.dim)
    return Passing(kept, forward, tape.peak - start), weight * z.c
