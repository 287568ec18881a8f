"""The private names of torch that measurements use still exist and do what they did."""

from __future__ import annotations

import torch
from torch import nn

from weft.measure.torch_internals import is_compiled
from weft.models.kernel_internals import fp8_mm


def test_fp8_product() -> None:
    a, b = (torch.randint(-4, 5, (32, 32)).float() for _ in range(2))
    eight = torch.float8_e4m3fn
    out = fp8_mm(a.to(eight), b.to(eight).t(), torch.ones(()), torch.ones(()), torch.bfloat16, fast=True)
    assert out.dtype == torch.bfloat16, "torch._scaled_mm takes other arguments"
    assert torch.allclose(out.float(), a @ b.t(), rtol=1e-2)


def test_a_compiled_module_is_recognised() -> None:
    module = nn.Linear(2, 2)
    assert not is_compiled(module)
    module.compile(backend="eager")
    assert is_compiled(module), "torch moved nn.Module._compiled_call_impl"
