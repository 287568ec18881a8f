"""Live bytes of named tensors through the passes of a block, for many layouts at once.

Sizes are arrays with one entry per layout; flags are the same for all layouts of one trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np

from weft.job.schema import Model
from weft.planner.engine_constants import ACTIVATION_SCALE_BLOCK, CODED_ELEMENTS, SMALL_ACTIVATIONS
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
    at_expert_gradients: Size = 0.0
    """Live bytes when the experts' gradients are complete."""
    retained: frozenset[str] = frozenset()
    """Tensors that are never freed."""

    def take(self, **sizes: Size) -> None:
        """Allocate tensors."""
        for name, size in sizes.items():
            self.held[name] = self.held.get(name, 0.0) + size
            self.live = self.live + size
            self.peak = np.maximum(self.peak, self.live)

    def drop(self, *names: str) -> None:
        """Free tensors; names that are not held are ignored."""
        for name in names:
            if name not in self.retained:
                self.live = self.live - self.held.pop(name, 0.0)

    def flash(self, size: Size) -> None:
        """Allocate and free bytes."""
        self.peak = np.maximum(self.peak, self.live + size)

    def weight_gradient(self, size: Size, retained: bool) -> None:
        """The gradient of a weight: consumed at once, or kept until its unit is done."""
        if self.frozen:
            return
        if retained:
            self.take(weights=size)
        else:
            self.flash(size)

    def encode(self, x: Size, c: int, copies: int, most: Size) -> tuple[Size, Size]:
        """Store what is held in fp8, except for small tensors. `x` are the bytes of a block's input, `c` those of an
        element. Returns the bytes that encoding one takes, with so many `copies` of it and what else the forward pass
        still has (`most` in all), and those of the largest that is stored."""
        working: Size = 0.0
        largest: Size = 0.0
        for name, size in self.held.items():
            width = FP32_BYTES if name in FP32_TENSORS else c
            elements = size / width
            coded = (elements >= x / c / SMALL_ACTIVATIONS) & (name not in EXACT_TENSORS)
            self.held[name] = np.where(coded, elements * CODED_BYTES, size)
            there = np.minimum(most, (2 if name == "soft" else copies) * size + 4 * x)
            working = np.maximum(working, (there + encoding(elements, width)) * coded)
            largest = np.maximum(largest, size * coded)
        self.live = sum(self.held.values())
        return working, largest


FP32_TENSORS = frozenset({
    "n_f", "n_y", "n2_f", "n2_y", "nc_f", "nc_y", "qn_f", "qn_y", "kn_f", "kn_y", "wide", "scores", "logits", "soft",
    "operands",
})  # fmt: skip
"""Names of tensors in fp32 in any precision."""
EXACT_TENSORS = frozenset({"lse", "choice", "order", "trip", "matrix", "lent"})
"""Names of what is not an activation: statistics, indices and weights."""


class LearnedScores(NamedTuple):
    """Bytes of attention whose scores have a learned part: without a fused kernel, of the softmax in fp32."""

    kept: Size = 0.0
    operands: Size = 0.0
    """Kept besides: of queries, keys and values in fp32 for every head, instead of those in the compute dtype."""
    forward: Size = 0.0
    backward: Size = 0.0


NONE_LEARNED = LearnedScores()


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
    retain: bool
    """Whether gradients of a unit's weights are kept until all of them are there."""
    fused: bool
    """One kernel for a norm (GPUs); on a CPU an RMS norm consists of several operators in fp32."""
    coded: bool = False
    """Whether saved activations are stored in fp8."""
    exchanged: Size = 0.0
    """1 where cp is above 1: keys and values, or all heads, are exchanged in attention."""
    one_chunk: Size = 0.0
    """1 where each rank of a ring holds one chunk of the sequence, not a half from either end: all at once."""
    tile: Size = 0.0
    """Bytes of scores that attention has at once where no fused kernel computes it."""
    tiled: Size = 0.0
    """1 where there are more scores than that: those of the tile before are still held."""
    learned: LearnedScores = NONE_LEARNED
    cross: bool = False
    """Whether the block also attends to the output of an encoder."""
    gathered: Size = 1.0
    """Keys and values that attention keeps, relative to those of the rank's own tokens: with learned scores over cp,
    those of all groups of the ring."""


CODED_BYTES = 1 + FP32_BYTES / ACTIVATION_SCALE_BLOCK
"""Bytes of an element in fp8, with its share of a scale."""


def encoding(elements: Size, c: int) -> Size:
    """Bytes of temporary tensors while a tensor of elements of `c` bytes is encoded: a padded copy and, part by part,
    values in fp32, the same divided by their scales, and codes."""
    values = FP32_BYTES * (2 if c < FP32_BYTES else 1) + 1
    return c * elements + values * np.minimum(elements, CODED_ELEMENTS)


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


def leave(t: LiveBytes, z: Sizes, name: str) -> None:
    """Leave a tensor-parallel region: its output is summed over tp."""
    whole = z.tokens * z.dim * z.c
    if not z.tp:
        t.take(**{name: whole})
    elif z.sequence:
        t.flash(2 * whole + z.rows * z.dim * z.c)
        t.take(**{name: z.rows * z.dim * z.c})
    else:
        t.flash(2 * whole)
        t.take(**{name: whole})


def into_region_backward(t: LiveBytes, z: Sizes, grad: str) -> None:
    """The gradient of a region's output; under sequence parallelism it is gathered."""
    if z.tp and z.sequence:
        whole = z.tokens * z.dim * z.c
        t.flash(2 * whole)
        t.take(**{grad: whole})


def out_of_region_backward(t: LiveBytes, z: Sizes, grad: str) -> None:
    whole, shard = z.tokens * z.dim * z.c, z.rows * z.dim * z.c
    if z.tp:
        t.flash(whole + (shard if z.sequence else 0))
    if z.tp and z.sequence:
        t.drop(grad)
        t.take(**{grad: shard})
