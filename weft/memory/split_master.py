"""Split master weights: the bf16 weight of the forward pass plus 16 more bits are the fp32 master weight.

bf16 is the upper half of fp32. Rounding halves away from zero makes the lower half, read as a signed number, the exact
difference, so 4 bytes hold both weights instead of 6. Rounding to even would not: at a tie the sign is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.foreach_internals import foreach_copy_

HALF = 0x8000
"""Half of the last bit of bf16, in the bits of fp32."""


def join(high: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """The fp32 weight of a bf16 weight and its low bits (int16)."""
    if high.is_cuda and high.is_contiguous():
        from weft.memory.split_kernels import join_kernel

        return join_kernel(high, low, out)
    bits = (high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    whole = bits.view(torch.float32)
    return whole if out is None else out.copy_(whole)


def split_(master: Tensor, high: Tensor, low: Tensor | None = None) -> None:
    """Write the bf16 weight of an fp32 weight, and its low bits."""
    if master.is_cuda and master.is_contiguous() and high.is_contiguous():
        from weft.memory.split_kernels import split_kernel

        split_kernel(master, high, low)
        return
    bits = master.view(torch.int32)
    high.copy_(((bits + HALF) >> 16).to(torch.int16).view(torch.bfloat16))
    if low is not None:
        low.copy_(bits.to(torch.int16))


def copy_rounded(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy fp32 weights to weights of the compute dtype; to bf16 as split_() rounds."""
    rest = []
    for target, source in zip(targets, sources, strict=True):
        if target.dtype == torch.bfloat16 and source.dtype == torch.float32:
            split_(source, target)
        else:
            rest.append((target, source))
    if rest:
        foreach_copy_([t for t, _ in rest], [s for _, s in rest])


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of an fp32 tensor in the compute dtype."""
    out = torch.empty_like(master, dtype=dtype)
    copy_rounded([out], [master])
    return out
