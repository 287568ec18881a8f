"""Bytes of the head: what is kept for the backward pass, and the peaks of both passes."""

from __future__ import annotations

import numpy as np

from weft.job.schema import Model
from weft.planner.engine_constants import ALIGNED_BYTES, LOGITS_BYTES
from weft.planner.memory.live_bytes import (
    FP32_BYTES,
    LiveBytes,
    PassBytes,
    Sizes,
    enter,
    keeps_input,
    norm,
    norm_backward,
    out_of_region_backward,
)
from weft.planner.model.model_facts import Size


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
