"""AdamW on CUDA in one pass: scales and clips the gradient, updates moments, master weight and compute weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def update(g, m, v, w, corrections, lr, beta1, beta2, eps, decay):
    """The new moments and weight."""
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    w -= lr * decay * w
    w -= lr / tl.load(corrections) * (m / (tl.sqrt(v) / tl.load(corrections + 1) + eps))
    return m, v, w


@triton.jit
def weft_adamw(
    master, copy, grad, mean, square, factor, taken, corrections, lr, beta1, beta2, eps, decay, size,
    COPY: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.where(tl.load(taken) != 0, size, 0)  # a skipped step reads and writes nothing
    g = tl.load(grad + at, mask=inside).to(tl.float32) * tl.load(factor)
    m = tl.load(mean + at, mask=inside)
    v = tl.load(square + at, mask=inside)
    if SPLIT:  # the master weight is the compute weight and 16 low bits (memory/split_master.py)
        high = tl.load(copy + at, mask=inside).to(tl.int16, bitcast=True).to(tl.int32)
        w = ((high << 16) + tl.load(master + at, mask=inside).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        w = tl.load(master + at, mask=inside)
    m, v, w = update(g, m, v, w, corrections, lr, beta1, beta2, eps, decay)
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    bits = w.to(tl.int32, bitcast=True)
    if SPLIT:
        tl.store(master + at, bits.to(tl.int16), mask=inside)
    else:
        tl.store(master + at, w, mask=inside)
    if COPY:
        if copy.dtype.element_ty == tl.bfloat16:
            tl.store(copy + at, ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        else:
            tl.store(copy + at, w.to(copy.dtype.element_ty), mask=inside)


def adamw_(
    master: Tensor, copy: Tensor | None, grad: Tensor, mean: Tensor, square: Tensor, factor: Tensor, taken: Tensor,
    corrections: Tensor, lr: float, betas: tuple[float, float], eps: float, decay: float,
) -> None:  # fmt: skip
    """Update one tensor. `corrections` are 1 − β₁ᵗ and √(1 − β₂ᵗ); `factor` multiplies the gradient; nothing changes if
    `taken` is 0. An int16 `master` is the low half of a split master weight."""
    size = master.numel()
    if size:
        weft_adamw[(triton.cdiv(size, BLOCK),)](
            master, master if copy is None else copy, grad.contiguous(), mean, square, factor, taken, corrections,
            lr, betas[0], betas[1], eps, decay, size, COPY=copy is not None,
            SPLIT=master.dtype == torch.int16, BLOCK=BLOCK, num_warps=8,
            enable_fp_fusion=False,  # as in coded_adamw_(), which must have the same bits
        )  # fmt: skip


def corrections_of(step: Tensor, betas: tuple[float, float]) -> Tensor:
    """Bias corrections of AdamW from a step count on the device, without synchronisation."""
    count = step.double()
    return torch.stack([1 - betas[0] ** count, (1 - betas[1] ** count).sqrt()]).float()
