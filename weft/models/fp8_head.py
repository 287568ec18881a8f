"""The head's three products in fp8, for jobs that ask for it (fp8.head).

The gradient of a logit is a probability, less one at the target: it lies between -1 and 1, so its scale is known and
the loss's own kernel writes it in fp8. Input and weight are scaled by their own maxima.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.fp8 import ALIGN, E4M3, E5M2, FAST, Recipe, cast, largest, scale_for, scaled_mm
from weft.models.loss import Products


def _by_rows(x: Tensor, scale: Tensor) -> Tensor:
    if x.is_cuda:
        from weft.models import fp8_kernels

        return fp8_kernels.cast_rows(x, scale, E4M3)
    return cast(x, scale, E4M3)


def transposed(x: Tensor) -> Tensor:
    """fp8 numbers [rows, columns] as [columns, rows], filled up with zeros to products' sizes."""
    if x.is_cuda:
        from weft.models import fp8_kernels

        flipped = fp8_kernels.transposed(x)
    else:
        flipped = x.t().contiguous()
    extra = -flipped.shape[1] % ALIGN
    return F.pad(flipped.view(torch.uint8), (0, extra)).view(x.dtype) if extra else flipped


class Fp8Products(Products):
    """As a head's own products, of factors rounded to fp8."""

    times = 2.0**15
    """Takes the gradient's range to the upper end of e5m2's, and leaves the smallest 5e-10."""

    def __init__(self, x: Tensor, weight: Tensor, recipe: Recipe):
        super().__init__(x, weight)
        self.fast = FAST[recipe.fast_accumulation]
        scale_x, scale_w = scale_for(largest(x), E4M3), scale_for(largest(weight), E4M3)
        self.of_x, self.of_w = scale_x.reciprocal(), scale_w.reciprocal()
        self.of_g = torch.full((), 1 / self.times, device=x.device)
        self.x8, self.w8 = _by_rows(x, scale_x), _by_rows(weight, scale_w)
        self.w8t: Tensor | None = None

    def logits(self, part: slice) -> Tensor:
        return scaled_mm(self.x8[part], self.w8.t(), self.of_x, self.of_w, self.fast[0])

    def room(self, logits: Tensor) -> Tensor:
        return torch.empty_like(logits, dtype=E5M2)

    def rounded(self, dlogits: Tensor) -> Tensor:
        return (dlogits * self.times).to(E5M2)

    def to_input(self, dlogits: Tensor, out: Tensor) -> None:
        if self.w8t is None:
            self.w8t = transposed(self.w8)
        out.copy_(scaled_mm(dlogits, self.w8t.t(), self.of_g, self.of_w, self.fast[1]))

    def to_weight(self, total: Tensor | None, dlogits: Tensor, part: slice, alone: bool) -> Tensor:
        product = scaled_mm(transposed(dlogits), transposed(self.x8[part]).t(), self.of_g, self.of_x, self.fast[2])
        if alone:
            return product
        return product.float() if total is None else total.add_(product)
