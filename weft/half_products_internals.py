"""Products of bf16 and fp16 tensors on processors without instructions for them: computed in fp32, and rounded once."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
PRODUCTS: dict[str, int] = {
    "mm": 1,
    "bmm": 1,
    "addmm": 1,
    "baddbmm": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
    "_slow_conv2d_forward": 1,
    "_slow_conv2d_backward.output_mask": 3,
}
"""torch's operators, and how many of their outputs have the dtype of their first argument. The others are fp32."""


@functools.cache
def multiply_halves_in_fp32() -> torch.library.Library:
    """Replace torch's kernels for CPUs in this process, while the result exists. Sums of products are fp32 in both."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, rounded in PRODUCTS.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
            library.impl(name, _in_fp32(kernel, rounded), "CPU", with_keyset=True, allow_override=True)
    return library


def _in_fp32(kernel: Callable[..., Any], rounded: int) -> Callable[..., Any]:
    def product(keys: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = args[0].dtype
        if dtype not in HALF:
            return kernel(keys, *args, **kwargs)
        out = kernel(keys, *map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})
        if isinstance(out, Tensor):
            return out.to(dtype)
        return (*(None if value is None else value.to(dtype) for value in out[:rounded]), *out[rounded:])

    return product


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value
