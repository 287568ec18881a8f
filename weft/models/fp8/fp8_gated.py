"""A gated feed-forward part in fp8 as one function, for delayed scales: SwiGLU is never stored in bf16.

    h = silu(x · Wgᵀ) · (x · Wuᵀ)        y = h · Wdᵀ

With scales from previous steps (fp8.amax: delayed) values can be cast where they are computed. x, h, the weights and
the gradients are each read once and written in fp8 by rows and by columns, as the products need them;
on CUDA by the kernels in fp8_kernels.py, elsewhere by torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.attention import TokenInfo
from weft.models.feedforward import FeedForward
from weft.models.fp8.fp8_linear import (
    E4M3,
    E5M2,
    FAST_ACCUMULATION,
    AmaxHistory,
    Fp8Linear,
    Fp8Recipe,
    G,
    W,
    X,
    cast,
    scale_for,
    scaled_mm,
)
from weft.planner.engine_constants import FP8_ALIGNMENT

RowsAndColumns = tuple[Tensor, Tensor]
"""A matrix in fp8: [rows, columns], and [columns, rows]."""


def _both(v: Tensor, scale: Tensor, seen: Tensor, dtype: torch.dtype) -> RowsAndColumns:
    seen.copy_(torch.maximum(seen, v.abs().amax().float()))
    low = cast(v, scale, dtype)
    return low, low.t().contiguous()


def cast_both(x: Tensor, scale: Tensor, seen: Tensor, dtype: torch.dtype) -> RowsAndColumns:
    """x · scale in fp8; `seen` [1] becomes at least x's largest magnitude."""
    if x.is_cuda:
        from weft.models.fp8 import fp8_kernels

        return fp8_kernels.cast_both(x, scale, seen, dtype)
    return _both(x, scale, seen, dtype)


def swiglu_both(gate: Tensor, up: Tensor, scale: Tensor, seen: Tensor) -> RowsAndColumns:
    if gate.is_cuda:
        from weft.models.fp8 import fp8_kernels

        return fp8_kernels.swiglu_both(gate, up, scale, seen, E4M3)
    return _both(F.silu(gate.float()) * up.float(), scale, seen, E4M3)


def swiglu_back_both(
    gate: Tensor, up: Tensor, grad: Tensor, scales: tuple[Tensor, Tensor], seen: tuple[Tensor, Tensor]
) -> tuple[RowsAndColumns, RowsAndColumns]:
    """The gradients of both factors."""
    if gate.is_cuda:
        from weft.models.fp8 import fp8_kernels

        a, b, c, d = fp8_kernels.swiglu_back_both(gate, up, grad, *scales, *seen, E5M2)
        return (a, b), (c, d)
    g, u, d = gate.float(), up.float(), grad.float()
    s = torch.sigmoid(g)
    of_gate = _both(d * u * s * (1 + g * (1 - s)), scales[0], seen[0], E5M2)
    return of_gate, _both(d * g * s, scales[1], seen[1], E5M2)


def _scales(past: Tensor, dtype: torch.dtype, *places: tuple[int, int]) -> list[Tensor]:
    """Scales from single maxima, as separate tensors: compiled products do not take views."""
    return [scale_for(past[i, kind], dtype) for i, kind in places]


class _Gated(torch.autograd.Function):
    """`past` and `seen` are [3 layers, 3 maxima], in the order gate, up, down and input, weight, gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, past: Tensor, seen: Tensor, recipe: Fp8Recipe
    ) -> Tensor:
        of_x, of_h, *of_w = scales = _scales(past, E4M3, (0, X), (2, X), (0, W), (1, W), (2, W))
        fast = FAST_ACCUMULATION[recipe.fast_accumulation][0]

        def multiply(a: RowsAndColumns, of_a: Tensor, i: int) -> Tensor:
            return scaled_mm(a[0], w8[i][0].t(), of_a.reciprocal(), of_w[i].reciprocal(), fast)

        x8 = cast_both(x, of_x, seen[0, X : X + 1], E4M3)
        w8 = [cast_both(w, of_w[i], seen[i, W : W + 1], E4M3) for i, w in enumerate((gate, up, down))]
        g, u = multiply(x8, of_x, 0), multiply(x8, of_x, 1)
        h8 = swiglu_both(g, u, of_h, seen[2, X : X + 1])
        ctx.save_for_backward(x8[1], g, u, h8[1], *(w[1] for w in w8), past, *scales)
        ctx.seen, ctx.recipe, ctx.kinds = seen, recipe, (x.dtype, gate.dtype)
        return multiply(h8, of_h, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x8t, g, u, h8t, gate8t, up8t, down8t, past, of_x, of_h, *of_w = ctx.saved_tensors
        of_g, seen = _scales(past, E5M2, (0, G), (1, G), (2, G)), ctx.seen
        _, fast_x, fast_w = FAST_ACCUMULATION[ctx.recipe.fast_accumulation]
        kind_x, kind_w = ctx.kinds

        def to_input(d: RowsAndColumns, w8t: Tensor, i: int) -> Tensor:
            return scaled_mm(d[0], w8t.t(), of_g[i].reciprocal(), of_w[i].reciprocal(), fast_x)

        def to_weight(d: RowsAndColumns, i: int, a8t: Tensor, of_a: Tensor) -> Tensor:
            return scaled_mm(d[1], a8t.t(), of_g[i].reciprocal(), of_a.reciprocal(), fast_w).to(kind_w)

        y8 = cast_both(grads[0], of_g[2], seen[2, G : G + 1], E5M2)
        of_gate, of_up = swiglu_back_both(
            g, u, to_input(y8, down8t, 2), (of_g[0], of_g[1]), (seen[0, G : G + 1], seen[1, G : G + 1])
        )
        dx = to_input(of_gate, gate8t, 0) + to_input(of_up, up8t, 1)
        dw = (to_weight(of_gate, 0, x8t, of_x), to_weight(of_up, 1, x8t, of_x), to_weight(y8, 2, h8t, of_h))
        return dx.to(kind_x), *dw, None, None, None


class Fp8FeedForward(FeedForward):
    """A gated feed-forward part whose three layers are in fp8 with delayed scales."""

    layers: list[AmaxHistory]
    seen: Tensor
    """Maxima of the three layers in this step [3, 3]; the layers hold views of it, and of `past`."""
    past: Tensor
    recipe: Fp8Recipe

    def forward(self, x: Tensor, info: TokenInfo) -> Tensor:
        if not self.layers[0].known or not torch.is_grad_enabled():
            return super().forward(x, info)  # the first step has no history, and evaluation does not update it
        assert self.gate is not None
        flat = x.reshape(-1, x.shape[-1])
        tokens = flat.shape[0]
        if extra := -tokens % FP8_ALIGNMENT:
            flat = F.pad(flat, (0, 0, 0, extra))
        weights = self.gate.weight, self.up.weight, self.down.weight
        y: Tensor = _Gated.apply(flat, *weights, self.past, self.seen, self.recipe)
        with torch.no_grad():  # gate and up share their input
            self.seen[1, X].copy_(torch.maximum(self.seen[0, X], self.seen[1, X]))
        return (y[:tokens] if extra else y).view(*x.shape[:-1], y.shape[-1])


def fuse_gated(module: FeedForward) -> None:
    """Fuse a SwiGLU part whose layers are all in fp8 with delayed scales, unsharded and without biases."""
    layers = [m for m in (module.gate, module.up, module.down) if type(m) is Fp8Linear]
    found = [m.maxima for m in layers if m.bias is None]
    maxima = [m for m in found if m is not None]
    if len(maxima) < 3 or module.activation is not F.silu:
        return
    module.__class__ = Fp8FeedForward
    assert isinstance(module, Fp8FeedForward)
    module.layers, module.recipe = maxima, layers[0].recipe
    module.seen, module.past = (torch.stack([getattr(m, name) for m in maxima]) for name in ("seen", "past"))
    for i, m in enumerate(maxima):
        m.seen, m.past = module.seen[i], module.past[i]
