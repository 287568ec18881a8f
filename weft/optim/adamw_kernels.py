"""AdamW on CUDA in one pass: scales and clips the gradient, updates moments, master weight and compute weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def weft_adamw(
    master, copy, grad, mean, square, factor, taken, corrections, lr, beta1, beta2, eps, decay, size,
    COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.where(tl.load(taken) != 0, size, 0)  # a skipped step reads and writes nothing
    g = tl.load(grad + at, mask=inside).to(tl.float32) * tl.load(factor)
    m = tl.load(mean + at, mask=inside)
    v = tl.load(square + at, mask=inside)
    w = tl.load(master + at, mask=inside)
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    w -= lr * decay * w
    w -= lr / tl.load(corrections) * (m / (tl.sqrt(v) / tl.load(corrections + 1) + eps))
    tl.store(mean + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    tl.store(master + at, w, mask=inside)
    if COPY:
        tl.store(copy + at, w.to(copy.dtype.element_ty), mask=inside)


def adamw_(
    master: Tensor, copy: Tensor | None, grad: Tensor, mean: Tensor, square: Tensor, factor: Tensor, taken: Tensor,
    corrections: Tensor, lr: float, betas: tuple[float, float], eps: float, decay: float,
) -> None:  # fmt: skip
    """Update one tensor. `corrections` are 1 − β₁ᵗ and √(1 − β₂ᵗ); `factor` multiplies the gradient; nothing changes if
    `taken` is 0."""
    size = master.numel()
    if size:
        weft_adamw[(triton.cdiv(size, BLOCK),)](
            master, master if copy is None else copy, grad.contiguous(), mean, square, factor, taken, corrections,
            lr, betas[0], betas[1], eps, decay, size, COPY=copy is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


def corrections_of(step: Tensor, betas: tuple[float, float]) -> Tensor:
    """Bias corrections of AdamW from a step count on the device, without synchronisation."""
    count = step.double()
    return torch.stack([1 - betas[0] ** count, (1 - betas[1] ** count).sqrt()]).float()
