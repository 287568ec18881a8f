"""torch's private names that measurements use: the scaled fp8 product, and whether a module is compiled."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def scaled_product(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """torch's scaled fp8 product with a bf16 result; a is row-major and b column-major."""
    out: Tensor = torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True)
    return out


def is_compiled(module: nn.Module) -> bool:
    """Whether module.compile() was called."""
    return module._compiled_call_impl is not None
