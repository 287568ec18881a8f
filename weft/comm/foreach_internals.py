"""Private torch names for operations on lists of tensors, which launch one kernel for many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def foreach_add_(tensors: Sequence[Tensor], value: Tensor) -> None:
    """Add a one-element tensor to each tensor. A list is passed because a single tensor would be read by the host."""
    torch._foreach_add_(list(tensors), [value] * len(tensors))


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    """Copy each source into its target."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def foreach_lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """tensor ← tensor + weight · (end - tensor)."""
    torch._foreach_lerp_(list(tensors), list(ends), weight)


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by a one-element tensor."""
    torch._foreach_mul_(list(tensors), factor)


def foreach_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each tensor, in fp32."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))
