"""Linear layers with fp8 products: e4m3 for inputs and weights, e5m2 for gradients (Micikevicius et al. 2022).

    y  = x · wᵀ      factors are scaled into the range of fp8, rounded, multiplied with fp32 sums and scaled back
    dx = g · w
    dw = gᵀ · x

Only torch operations on whole tensors and no synchronisation with the host, so that torch.compile gets the products,
maxima, casts and transposes as one graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.kernel_internals import fp8_mm
from weft.models.lora import adapted
from weft.planner.engine_constants import FP8_ALIGNMENT

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUT_DTYPE = torch.bfloat16
"""Dtype of the products' results."""
FAST_ACCUMULATION: dict[str, tuple[bool, bool, bool]] = {
    "none": (False, False, False),
    "forward": (True, False, False),
    "all": (True, True, True),
}
"""By the job's setting, which of the products y, dx, dw may accumulate in the tensor cores' shorter registers."""
X, W, G = range(3)
"""Indices of input, weight and gradient in a layer's three maxima."""


@dataclass(frozen=True)
class Fp8Recipe:
    """How values are scaled into the range of fp8: the `fp8` section of a job."""

    scaling: str = "tensorwise"
    amax: str = "dynamic"
    history: int = 16
    fast_accumulation: str = "forward"
    head: bool = False
    skip: tuple[str, ...] = ()


class AmaxHistory:
    """Largest input, weight and gradient of one layer, in this step and in previous ones."""

    def __init__(self, history: int, device: torch.device):
        self.seen = torch.zeros(3, device=device)
        """In this step so far, on this rank."""
        self.past = torch.zeros(3, device=device)
        """Over the steps of the history; the scales are computed from it."""
        self.steps = torch.zeros(history, 3, device=device)
        self.known = False
        """False in the first step, in which tensors are scaled by their own maximum."""
        self.input = self
        """The layer whose input this one shares: one scale, and so one cast."""


def scaled_mm(a: Tensor, b: Tensor, unscale_a: Tensor, unscale_b: Tensor, fast: bool) -> Tensor:
    """a [m, k] · b [k, n] of fp8 factors, times what undoes their scales: numbers, or [m, 1] and [1, n].

    CUDA needs `a` stored by rows and `b` by columns. CPUs multiply in fp32: not every CPU kernel takes scales by row.
    """
    if a.device.type == "cuda":
        return fp8_mm(a, b, unscale_a, unscale_b, OUT_DTYPE, fast)
    with torch.autocast(a.device.type, enabled=False):
        return ((a.float() @ b.float()) * unscale_a * unscale_b).to(OUT_DTYPE)


def scale_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two that keeps `amax` in range.

    Powers of two change no digit, so ranks with slightly different maxima round equally.
    """
    scale = torch.finfo(dtype).max / amax.float().clamp(min=1e-30)
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def largest(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest magnitude of all of x, or along dim."""
    return x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x · scale in fp8, clamped to its range, which a delayed scale may exceed."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


def _by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


class _Tensorwise(torch.autograd.Function):
    """One scale per tensor. Inputs and weights are saved uncast, because others save them too, and cast again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, scale_g: Tensor | None, seen: Tensor | None,
        recipe: Fp8Recipe,
    ) -> Tensor:  # fmt: skip
        # x [tokens, in], w [out, in]
        ctx.save_for_backward(x, w, scale_x, scale_w, scale_g)
        ctx.seen, ctx.recipe = seen, recipe
        fast = FAST_ACCUMULATION[recipe.fast_accumulation][0]
        x8, w8 = cast(x, scale_x, E4M3), cast(w, scale_w, E4M3)
        return scaled_mm(x8, w8.t(), scale_x.reciprocal(), scale_w.reciprocal(), fast)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, scale_x, scale_w, scale_g = ctx.saved_tensors
        g = grads[0]  # [tokens, out]
        _, fast_x, fast_w = FAST_ACCUMULATION[ctx.recipe.fast_accumulation]
        amax = largest(g).float()
        if ctx.seen is not None:
            ctx.seen[G : G + 1].copy_(torch.maximum(ctx.seen[G : G + 1], amax.reshape(1)))
        if scale_g is None:
            scale_g = scale_for(amax, E5M2)
        g8, back = cast(g, scale_g, E5M2), scale_g.reciprocal()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            w8 = _by_columns(cast(w, scale_w, E4M3))
            dx = scaled_mm(g8, w8, back, scale_w.reciprocal(), fast_x).to(x.dtype)
        if ctx.needs_input_grad[1]:
            x8 = _by_columns(cast(x, scale_x, E4M3))
            dw = scaled_mm(g8.t().contiguous(), x8, back, scale_x.reciprocal(), fast_w).to(w.dtype)
        return dx, dw, None, None, None, None, None


class _Rowwise(torch.autograd.Function):
    """One scale per row of the left factor and per column of the right one, in each of the three products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: Fp8Recipe) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        scale_x, scale_w = scale_for(largest(x, 1), E4M3), scale_for(largest(w, 1), E4M3)  # [tokens, 1], [out, 1]
        x8, w8 = cast(x, scale_x, E4M3), cast(w, scale_w, E4M3)
        fast = FAST_ACCUMULATION[recipe.fast_accumulation][0]
        return scaled_mm(x8, w8.t(), scale_x.reciprocal(), scale_w.reciprocal().t(), fast)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        g = grads[0]
        _, fast_x, fast_w = FAST_ACCUMULATION[ctx.recipe.fast_accumulation]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            scale_g, scale_w = scale_for(largest(g, 1), E5M2), scale_for(largest(w, 0), E4M3)  # [tokens, 1], [1, in]
            g8, w8 = cast(g, scale_g, E5M2), _by_columns(cast(w, scale_w, E4M3))
            dx = scaled_mm(g8, w8, scale_g.reciprocal(), scale_w.reciprocal(), fast_x).to(x.dtype)
        if ctx.needs_input_grad[1]:
            scale_g, scale_x = scale_for(largest(g, 0), E5M2), scale_for(largest(x, 0), E4M3)  # [1, out], [1, in]
            g8, x8 = cast(g, scale_g, E5M2).t().contiguous(), _by_columns(cast(x, scale_x, E4M3))
            dw = scaled_mm(g8, x8, scale_g.reciprocal().t(), scale_x.reciprocal(), fast_w).to(w.dtype)
        return dx, dw, None


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Fp8Recipe, maxima: AmaxHistory | None = None
) -> Tensor:
    """x [..., in] · weightᵀ + bias with fp8 products; weight [out, in], both sizes multiples of 16."""
    flat = x.reshape(-1, x.shape[-1])
    tokens = flat.shape[0]
    if extra := -tokens % FP8_ALIGNMENT:  # dw sums over tokens; zero rows change no maximum and no sum
        flat = F.pad(flat, (0, 0, 0, extra))
    if recipe.scaling == "rowwise":
        y: Tensor = _Rowwise.apply(flat, weight, recipe)
    else:
        y = _tensorwise(flat, weight, recipe, maxima)
    y = (y[:tokens] if extra else y).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def _tensorwise(x: Tensor, weight: Tensor, recipe: Fp8Recipe, maxima: AmaxHistory | None) -> Tensor:
    with torch.no_grad():  # separate operations, so that layers with the same input share its maximum, scale and cast
        amax_x, amax_w = largest(x), largest(weight)
    seen = scale_g = None
    if maxima is not None and torch.is_grad_enabled():  # evaluation does not update the history
        seen = maxima.seen
        with torch.no_grad():
            seen[:G].copy_(torch.maximum(seen[:G], torch.stack([amax_x, amax_w]).float()))
    if maxima is not None and maxima.known:
        amax_x, amax_w = maxima.input.past[X], maxima.past[W]
        scale_g = scale_for(maxima.past[G], E5M2)
    y: Tensor = _Tensorwise.apply(x, weight, scale_for(amax_x, E4M3), scale_for(amax_w, E4M3), scale_g, seen, recipe)
    return y


class Fp8Layer:
    """Mixin of linear layers with fp8 products; parameters and checkpoints do not change."""

    recipe: Fp8Recipe
    maxima: AmaxHistory | None

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8_linear(x, weight, bias, self.recipe, self.maxima)


class Fp8Linear(Fp8Layer, nn.Linear):
    """A linear layer on one device with its products in fp8."""

    def forward(self, x: Tensor) -> Tensor:
        return adapted(self, x, self.multiply(x, self.weight, self.bias))
