"""torch's private name that measurements use: whether a module is compiled."""

from __future__ import annotations

from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether module.compile() was called."""
    return module._compiled_call_impl is not None
