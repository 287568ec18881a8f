"""The loss of a chunk of logits and its gradient on CUDA in one kernel; in place, or in another dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def weft_cross_entropy(
    logits, grads, targets, valid, losses, vocab, stride, stride_grads, smoothing, times,
    GRAD: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    grads += row * stride_grads
    target = tl.load(targets + row)
    counts = tl.load(valid + row).to(tl.float32)
    peak = float("-inf")
    total = 0.0
    plain = 0.0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher))
        peak = higher
        if SMOOTH:
            plain += tl.sum(tl.where(at < vocab, x, 0.0))
    lse = peak + tl.log(total)
    inside = (target >= 0) & (target < vocab)  # targets of masked tokens may be anything
    hit = tl.load(logits + tl.where(inside, target, 0)).to(tl.float32)
    loss = lse - (1.0 - smoothing) * hit
    if SMOOTH:
        loss -= smoothing / vocab * plain
    tl.store(losses + row, tl.where(counts > 0, loss, 0.0))
    if GRAD:
        tl.debug_barrier()  # the target's logit is read before any thread overwrites it
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            d = tl.exp(x - lse)
            if SMOOTH:
                d -= smoothing / vocab
            d = tl.where(at == target, d - (1.0 - smoothing), d) * (counts * times)
            tl.store(grads + at, d.to(grads.dtype.element_ty), mask=at < vocab)


def cross_entropy(
    logits: Tensor, targets: Tensor, valid: Tensor, smoothing: float, room: Tensor | None, times: float = 1.0
) -> Tensor:
    """The losses of logits [rows, vocab], 0 where they are masked; `room`, maybe the logits, becomes the gradient of
    their sum, weighted by `valid`, times `times`."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    grads = logits if room is None else room
    weft_cross_entropy[(logits.shape[0],)](
        logits, grads, targets, valid, losses, logits.shape[1], logits.stride(0), grads.stride(0), float(smoothing),
        float(times), GRAD=room is not None, SMOOTH=smoothing > 0, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return losses
