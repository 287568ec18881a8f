"""Shallow copies of modules with another child or other parameters, and buffers in host memory.

Uses nn.Module's dictionaries `_modules`, `_parameters` and `_buffers`.
"""

from __future__ import annotations

import torch
from torch import nn


def set_child(module: nn.Module, name: str, child: nn.Module) -> None:
    """Replace a child of a shallow copy."""
    module.__dict__["_modules"] = {**module._modules, name: child}


def set_host_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Replace the parameters of a shallow copy by zeros in host memory, and return them."""
    zeros = {
        name: param if param is None else nn.Parameter(torch.zeros(param.shape, dtype=param.dtype, device="cpu"))
        for name, param in module._parameters.items()
    }
    module.__dict__["_parameters"] = zeros
    return zeros


def set_host_buffer(module: nn.Module, name: str, like: torch.Tensor) -> None:
    """Replace a buffer by zeros in host memory; it stays persistent, or not, as it is."""
    module._buffers[name] = torch.zeros(like.shape, dtype=like.dtype, device="cpu")
