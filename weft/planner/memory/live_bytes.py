"""Live bytes of named tensors outside the blocks, for many layouts at once.

Sizes are arrays with one entry per layout; flags are the same for all layouts of one trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np

from weft.job.schema import Model
from weft.planner.engine_constants import ACTIVATION_SCALE_BLOCK, ALIGNED_BYTES, LOGITS_BYTES
from weft.planner.model.model_facts import Size

FP32_BYTES = 4


@dataclass
class LiveBytes:
    """Live bytes by tensor name, and their peak."""

    held: dict[str, Size] = field(default_factory=dict)
    live: Size = 0.0
    peak: Size = 0.0
    frozen: bool = False
    """Whether the weights are frozen, and have no gradients."""

    def take(self, **sizes: Size) -> None:
        """Allocate tensors."""
        for name, size in sizes.items():
            self.held[name] = self.held.get(name, 0.0) + size
            self.live = self.live + size
            self.peak = np.maximum(self.peak, self.live)

    def drop(self, *names: str) -> None:
        """Free tensors; names that are not held are ignored."""
        for name in names:
            self.live = self.live - self.held.pop(name, 0.0)

    def flash(self, size: Size) -> None:
        """Allocate and free bytes."""
        self.peak = np.maximum(self.peak, self.live + size)


@dataclass(frozen=True)
class Sizes:
    """Elements on a rank for one microbatch."""

    rows: Size
    """Tokens that norms and residuals hold: split with tp under sequence parallelism."""
    tokens: Size
    """Tokens that matrix products read."""
    dim: int
    heads: Size
    """Width of all queries of this rank."""
    kv: Size
    scores: Size
    """Heads of this rank."""
    ffn: Size
    c: int
    """Bytes of an element."""
    tp: bool
    """Whether tp is above 1."""
    sequence: bool
    fused: bool
    """One kernel for a norm (GPUs); on a CPU an RMS norm consists of several operators in fp32."""
    coded: bool = False
    """Whether saved activations are stored in fp8."""
    tile: Size = 0.0
    """Bytes of scores that attention has at once where no fused kernel computes it."""
    tiled: Size = 0.0
    """1 where there are more scores than that: those of the tile before are still held."""


CODED_BYTES = 1 + FP32_BYTES / ACTIVATION_SCALE_BLOCK
"""Bytes of an element in fp8, with its share of a scale."""


@dataclass(frozen=True)
class PassBytes:
    """Bytes of one unit for one microbatch, above what is live when a pass begins.

    Forward begins with the unit's input, backward with all that was kept and the gradient of its output.
    """

    kept: Size
    """Between forward and backward, with its output (the next unit's input)."""
    forward: Size
    backward: Size
    inner: Size = 0.0
    """Bytes of those live at the start of backward that are freed when the experts' gradients are complete."""
    later: Size = 0.0
    """Kept for the gradients of weights by the first half of a split backward pass."""
    input_pass: Size = 0.0
    """The peak of that half."""

    def split(self, where: Size, stages: Size) -> PassBytes:
        """The same with a backward pass in two halves, each through one of so many stages; in one part elsewhere."""
        back = np.where(where, self.input_pass, self.backward)
        return replace(self, later=self.later * where / stages, input_pass=back)

    def on(self, mask: Size) -> PassBytes:
        """The same on ranks where the mask is 1, nothing where it is 0."""
        return PassBytes(*(getattr(self, row) * mask for row in PASS_ROWS))


PASS_ROWS = tuple(field.name for field in fields(PassBytes))


def keeps_input(m: Model, z: Sizes) -> bool:
    """Whether a norm saves its input; a CPU's RMS norm in bf16 saves a copy in fp32 instead."""
    return z.fused or m.norm == "layernorm" or z.c == FP32_BYTES


def norm(t: LiveBytes, m: Model, z: Sizes, out: str, rows: Size, width: int) -> None:
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
    if t.frozen:  # only the gradient of its weight needs it
        t.drop(f"{out}_y")


def norm_gradient(m: Model, z: Sizes, elements: Size) -> Size:
    """Bytes of the gradient of a norm's output, in fp32 where it consists of several operators."""
    return elements * (z.c if z.fused or m.norm == "layernorm" else FP32_BYTES)


def norm_backward(t: LiveBytes, m: Model, z: Sizes, out: str, grad: str, rows: Size, width: int) -> None:
    """From the gradient `grad` of the norm's output to that of its input, under the same name."""
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


def norm_bytes(m: Model, z: Sizes) -> PassBytes:
    """A norm outside the blocks."""
    tape = LiveBytes()
    norm(tape, m, z, "n", z.rows, z.dim)
    kept, forward = tape.live, tape.peak
    tape.take(dn=z.rows * z.dim * z.c)
    start = tape.peak = tape.live
    norm_backward(tape, m, z, "n", "dn", z.rows, z.dim)
    return PassBytes(kept, forward, tape.peak - start)


def enter(t: LiveBytes, z: Sizes, name: str) -> None:
    """Into a region of cut matrices; the shard that was gathered stays with its caller for a while."""
    if z.tp and z.sequence:
        shard = t.held[name]
        t.drop(name)
        whole = z.tokens * z.dim * z.c
        t.take(**{f"{name}0": shard})
        t.flash(2 * whole)
        t.take(**{name: whole})


def out_of_region_backward(t: LiveBytes, z: Sizes, grad: str) -> None:
    whole, shard = z.tokens * z.dim * z.c, z.rows * z.dim * z.c
    if z.tp:
        t.flash(whole + (shard if z.sequence else 0))
    if z.tp and z.sequence:
        t.drop(grad)
        t.take(**{grad: shard})


def head_bytes(m: Model, z: Sizes, vocab: Size, targets: Size, device: str) -> tuple[PassBytes, Size]:
    """The last norm and the loss in chunks of logits; also the bytes of the head's gradient, made in forward. On a GPU
    one kernel turns a whole vocabulary's logits into their gradient; otherwise both have copies in fp32."""
    tape = LiveBytes(frozen=m.lora is not None)
    x = z.rows * z.dim * z.c
    tape.take(x=x)
    if m.hides_tokens and not m.classes:
        tape.take(transformed=2 * x)
    norm(tape, m, z, "n", z.rows, z.dim)
    if not keeps_input(m, z):
        tape.drop("x")
    enter(tape, z, "n")
    chunk = LOGITS_BYTES[device] // (FP32_BYTES if device == "cpu" else z.c)
    chunks = np.maximum(1.0, np.ceil(targets / np.maximum(1.0, chunk // np.maximum(1.0, vocab))))
    rows = np.ceil(targets / chunks)
    one, weight = rows * vocab, vocab * z.dim * (m.lora is None)
    alone = chunks == 1  # the product is the gradient, and no fp32 sum is made
    tape.take(dx=targets * z.dim * z.c, dw=np.where(alone, 0.0, weight * FP32_BYTES))
    mixed = z.c < FP32_BYTES
    in_place = device == "cuda" and not z.tp
    padded = vocab * z.dim * z.c * (vocab * z.c % ALIGNED_BYTES > 0) * (device == "cuda")
    tape.flash(padded + one * (z.c if in_place else 2 * FP32_BYTES + (2 * z.c if mixed else 0)))
    tape.flash(np.where(alone | mixed, one * z.c + weight * z.c, 0.0))
    tape.drop("dw")
    tape.take(dw=weight * z.c)
    tape.drop("n", "n0")
    kept, forward = tape.live - x, tape.peak - x
    start = tape.peak = tape.live
    tape.drop("dw")  # from here on it counts as a gradient
    if m.labels_samples:
        tape.drop("dx")
        tape.take(dx=z.tokens * z.dim * z.c)
    out_of_region_backward(tape, z, "dx")
    norm_backward(tape, m, z, "n", "dx", z.rows, z.dim)
    return PassBytes(kept, forward, tape.peak - start), weight * z.c
