"""A tape of tensors that come and go, and what every part of a block does on it: norms, ways into regions and out."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.job.schema import Model

FP32_BYTES = 4


@dataclass
class Tape:
    """Live bytes by name, and the most there ever were."""

    held: dict[str, float] = field(default_factory=dict)
    live: float = 0.0
    peak: float = 0.0
    noted: float = 0.0
    """What was live when the experts' gradients were there."""

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
    inner: float = 0.0
    """Of what is there when backward begins, what has gone by the time the experts' gradients are there: less than
    nothing where a block is computed again."""


def keeps_input(m: Model, z: Sizes) -> bool:
    """Whether a norm saves its input as it is; a CPU's RMS norm in bf16 saves a copy in fp32 instead."""
    return z.fused or m.norm == "layernorm" or z.c == FP32_BYTES


def norm(t: Tape, m: Model, z: Sizes, into: str, out: str, rows: float, width: int, number: int) -> None:
    size = rows * width
    if m.norm == "layernorm" or z.fused:
        t.take(**{f"{out}_stats": rows * FP32_BYTES * (2 if m.norm == "layernorm" else 1), out: size * z.c})
        return
    if z.c < FP32_BYTES:
        t.take(**{f"{out}_f": size * FP32_BYTES})
    t.flash(size * FP32_BYTES + 2 * rows * FP32_BYTES)
    t.take(**{f"{out}_r": rows * FP32_BYTES, f"{out}_y": size * FP32_BYTES})
    if z.c < FP32_BYTES:
        t.flash(size * (FP32_BYTES + z.c))
    t.take(**{out: size * z.c})


def norm_backward(t: Tape, m: Model, z: Sizes, out: str, grad: str, rows: float, width: int) -> None:
    """From the gradient `grad` of the norm's output, which is there, to that of its input under the same name."""
    size = rows * width
    if m.norm == "layernorm" or z.fused:
        t.flash(size * z.c)
        t.drop(f"{out}_stats")
        return
    wide = size * FP32_BYTES
    if z.c < FP32_BYTES:
        t.take(_f=wide)
        t.drop(grad)
    # gradient, its products with the weight and with y, then those of the input's two ways
    t.flash(2 * wide)
    t.take(_g=wide)
    t.drop(f"{out}_y", "_f") if z.c < FP32_BYTES else t.drop(f"{out}_y", grad)
    t.flash(4 * wide)
    t.drop(f"{out}_f", f"{out}_r")
    t.drop("_g")
    t.take(**{grad: size * z.c})


def enter(t: Tape, z: Sizes, name: str) -> None:
    """Into a region of cut matrices; the shard that was gathered stays with its caller for a while."""
    if z.tp > 1 and z.sequence:
        shard = t.held[name]
        t.drop(name)
        whole = z.tokens * z.dim * z.c
        t.take(**{f"{name}0": shard})
        t.flash(2 * whole)
        t.take(**{name: whole})


def leave(t: Tape, z: Sizes, name: str) -> None:
    whole = z.tokens * z.dim * z.c
    if z.tp == 1:
        t.take(**{name: whole})
    elif z.sequence:
        t.flash(2 * whole + z.rows * z.dim * z.c)
        t.take(**{name: z.rows * z.dim * z.c})
    else:
        t.flash(2 * whole)
        t.take(**{name: whole})


def into_region_backward(t: Tape, z: Sizes, grad: str) -> None:
    """The gradient of a region's output, whole; under sequence parallelism it is gathered."""
    if z.tp > 1 and z.sequence:
        whole = z.tokens * z.dim * z.c
        t.flash(2 * whole)
        t.take(**{grad: whole})


def out_of_region_backward(t: Tape, z: Sizes, grad: str) -> None:
    whole, shard = z.tokens * z.dim * z.c, z.rows * z.dim * z.c
    if z.tp > 1:
        t.flash(whole + (shard if z.sequence else 0))
    if z.tp > 1 and z.sequence:
        t.drop(grad)
        t.take(**{grad: shard})
