"""The head's three products in fp8 (fp8.head).

The gradient of a logit is between -1 and 1, so its scale is fixed and the loss kernel writes it in fp8. Input and
weight are scaled by their own maxima.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.models.fp8.fp8_linear import E4M3, E5M2, FAST_ACCUMULATION, Fp8Recipe, cast, largest, scale_for, scaled_mm
from weft.models.loss import HeadProducts
from weft.planner.engine_constants import FP8_ALIGNMENT, FP8_LOGITS_CHUNKS, LOGITS_BYTES


def _by_rows(x: Tensor, scale: Tensor) -> Tensor:
    if x.is_cuda:
        from weft.models.fp8 import fp8_kernels

        return fp8_kernels.cast_rows(x, scale, E4M3)
    return cast(x, scale, E4M3)


def _transpose_into(x: Tensor, out: Tensor) -> None:
    """Transpose fp8 values [rows, columns] into out [columns, rows], which may have a larger row stride."""
    if x.is_cuda:
        from weft.models.fp8 import fp8_kernels

        fp8_kernels.transpose(x, out)
    else:
        out.copy_(x.t())


def _transposed(x: Tensor) -> Tensor:
    """fp8 values [rows, columns] as [columns, rows], padded with zeros to the alignment of fp8 products."""
    rows, columns = x.shape
    extra = -rows % FP8_ALIGNMENT
    out = torch.empty(columns, rows + extra, dtype=x.dtype, device=x.device)
    _transpose_into(x, out[:, :rows])
    if extra:
        out[:, rows:] = 0
    return out


class Fp8HeadProducts(HeadProducts):
    """Products of factors rounded to fp8.

    The weight gradient is one product for several chunks, because fp8 products cannot accumulate into their output.
    """

    times = 2.0**15
    """Moves the gradient to the upper end of e5m2's range; the smallest non-zero value is 5e-10."""

    def __init__(self, x: Tensor, weight: Tensor, rows: int, recipe: Fp8Recipe):
        super().__init__(x, weight, rows)
        self.fast = FAST_ACCUMULATION[recipe.fast_accumulation]
        scale_x, scale_w = scale_for(largest(x), E4M3), scale_for(largest(weight), E4M3)
        self.of_x, self.of_w = scale_x.reciprocal(), scale_w.reciprocal()
        self.of_g = torch.full((), 1 / self.times, device=x.device)
        self.x8, self.w8 = _by_rows(x, scale_x), _by_rows(weight, scale_w)
        self.w8t: Tensor | None = None
        most = LOGITS_BYTES[x.device.type] * FP8_LOGITS_CHUNKS // (max(1, weight.shape[0]) * rows)
        self.group = min(max(1, most) * rows, len(x))
        """Tokens of one product for the weight gradient."""
        self.first = 0
        self.held: Tensor | None = None
        """Gradient of the logits of this group, from token `first` on [vocab, tokens]."""

    def logits(self, part: slice) -> Tensor:
        return scaled_mm(self.x8[part], self.w8.t(), self.of_x, self.of_w, self.fast[0])

    def room(self, logits: Tensor) -> Tensor:
        return torch.empty_like(logits, dtype=E5M2)

    def rounded(self, dlogits: Tensor) -> Tensor:
        return (dlogits * self.times).to(E5M2)

    def to_input(self, dlogits: Tensor, out: Tensor) -> None:
        if self.w8t is None:
            self.w8t = _transposed(self.w8)
        out.copy_(scaled_mm(dlogits, self.w8t.t(), self.of_g, self.of_w, self.fast[1]))

    def to_weight(self, dlogits: Tensor, part: slice) -> None:
        end = part.start + len(dlogits)
        if self.held is None:
            self.first, width = part.start, min(self.group, len(self.x) - part.start)
            self.held = dlogits.new_empty(dlogits.shape[1], width + -width % FP8_ALIGNMENT)
            self.held[:, width:] = 0
        _transpose_into(dlogits, self.held[:, part.start - self.first : end - self.first])
        if end - self.first < min(self.group, len(self.x) - self.first):
            return
        product = scaled_mm(self.held, _transposed(self.x8[self.first : end]).t(), self.of_g, self.of_x, self.fast[2])
        self.held = None
        if self.dw is None:
            self.dw = product if self.group >= len(self.x) else product.float()
        else:
            self.dw += product
