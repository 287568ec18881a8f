"""A gated feed-forward part in fp8 as one function, for delayed scales: SwiGLU is never stored in bf16.

    h = silu(x · Wgᵀ) · (x · Wuᵀ)        y = h · Wdᵀ

With scales from previous steps (fp8.amax: delayed) values can be cast where they are computed: on CUDA by the kernels
in fp8_kernels.py, elsewhere by torch operations. The products of the forward pass take their factors by rows, those of
the backward pass by columns. Kept in between are x by columns in fp8, and both factors of h; h and the weights are cast
again, since a copy of all weights would stay on every rank that shards them.
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


def _rows(v: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return cast(v, scale, dtype), v.abs().amax().float().reshape(1)


def _both(v: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    low, seen = _rows(v, scale, dtype)
    return low, low.t().contiguous(), seen


def cast_seen(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x · scale in fp8, and x's largest magnitude."""
    if x.is_cuda:
        from weft.models.fp8 import fp8_kernels

        return fp8_kernels.cast_seen(x, scale, dtype)
    return _rows(x, scale, dtype)


def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x · scale in fp8, by rows and by columns, and x's largest magnitude."""
    if x.is_cuda:
        from weft.models.fp8 import fp8_kernels

        return fp8_kernels.cast_both(x, scale, dtype)
    return _both(x, scale, dtype)


def cast_columns(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x · scale in fp8, by columns."""
    if x.is_cuda:
        from weft.models.fp8 import fp8_kernels

        return fp8_kernels.cast_columns(x, scale, dtype)
    return cast(x, scale, dtype).t().contiguous()


def swiglu(gate: Tensor, up: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """h in fp8, and its largest magnitude."""
    if gate.is_cuda:
        from weft.models.fp8 import fp8_kernels

        return fp8_kernels.swiglu(gate, up, scale, E4M3)
    return _rows(F.silu(gate.float()) * up.float(), scale, E4M3)


def swiglu_back(gate: Tensor, up: Tensor, grad: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
    """The gradients of both factors by rows and by columns, h by columns, and the largest magnitudes of both gradients.
    The scales are those of both gradients and of h."""
    if gate.is_cuda:
        from weft.models.fp8 import fp8_kernels

        return fp8_kernels.swiglu_back(gate, up, grad, *scales, E5M2, E4M3)
    g, u, d = gate.float(), up.float(), grad.float()
    s = torch.sigmoid(g)
    *of_gate, seen_gate = _both(d * u * s * (1 + g * (1 - s)), scales[0], E5M2)
    *of_up, seen_up = _both(d * g * s, scales[1], E5M2)
    return *of_gate, *of_up, cast(F.silu(g) * u, scales[2], E4M3).t().contiguous(), seen_gate, seen_up


def _record(seen: Tensor, kind: int, *maxima: Tensor) -> None:
    """Note maxima of the layers from the first one on."""
    column = seen[: len(maxima), kind]
    column.copy_(torch.maximum(column, torch.cat(maxima)))


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

        def multiply(a: Tensor, of_a: Tensor, i: int) -> tuple[Tensor, Tensor]:
            w8, seen_w = cast_seen((gate, up, down)[i], of_w[i], E4M3)
            return scaled_mm(a, w8.t(), of_a.reciprocal(), of_w[i].reciprocal(), fast), seen_w

        x8, x8t, seen_x = cast_both(x, of_x, E4M3)
        (g, seen_gate), (u, seen_up) = multiply(x8, of_x, 0), multiply(x8, of_x, 1)
        h8, seen_h = swiglu(g, u, of_h)
        y, seen_down = multiply(h8, of_h, 2)
        _record(seen, X, seen_x, seen_x, seen_h)
        _record(seen, W, seen_gate, seen_up, seen_down)
        ctx.save_for_backward(x8t, g, u, gate, up, down, past, *scales)
        ctx.seen, ctx.recipe, ctx.kinds = seen, recipe, (x.dtype, gate.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x8t, g, u, gate, up, down, past, of_x, of_h, *of_w = ctx.saved_tensors
        of_g = _scales(past, E5M2, (0, G), (1, G), (2, G))
        _, fast_x, fast_w = FAST_ACCUMULATION[ctx.recipe.fast_accumulation]
        kind_x, kind_w = ctx.kinds

        def to_input(d8: Tensor, w: Tensor, i: int) -> Tensor:
            w8t = cast_columns(w, of_w[i], E4M3)
            return scaled_mm(d8, w8t.t(), of_g[i].reciprocal(), of_w[i].reciprocal(), fast_x)

        def to_weight(d8t: Tensor, i: int, a8t: Tensor, of_a: Tensor) -> Tensor:
            return scaled_mm(d8t, a8t.t(), of_g[i].reciprocal(), of_a.reciprocal(), fast_w).to(kind_w)

        y8, y8t, seen_y = cast_both(grads[0], of_g[2], E5M2)
        gate8, gate8t, up8, up8t, h8t, *seen = swiglu_back(g, u, to_input(y8, down, 2), of_g[0], of_g[1], of_h)
        _record(ctx.seen, G, *seen, seen_y)
        dx = to_input(gate8, gate, 0) + to_input(up8, up, 1)
        dw = to_weight(gate8t, 0, x8t, of_x), to_weight(up8t, 1, x8t, of_x), to_weight(y8t, 2, h8t, of_h)
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
