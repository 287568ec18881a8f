"""torch's private name for the buffers of a module that its state does not hold."""

from __future__ import annotations

from torch import nn


def passing_buffers(module: nn.Module) -> set[str]:
    """The buffers registered with persistent=False, of this module alone."""
    return module._non_persistent_buffers_set
