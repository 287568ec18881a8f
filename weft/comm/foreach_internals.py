"""Private torch names for operations on lists of tensors, which launch one kernel for many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def foreach_add_(tensors: Sequence[Tensor], value: Tensor) -> None:
    """Add a one-element tensor to each tensor. A list is passed because a single tensor would be read by the host."""
    torch._foreach_add_(list(tensors), [value] * len(tensors))


def foreach_add_scaled(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: float) -> list[Tensor]:
    """tensor + factor · other."""
    return list(torch._foreach_add(list(tensors), list(others), alpha=factor))


def foreach_add_scaled_(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: float = 1.0) -> None:
    """tensor ← tensor + factor · other."""
    torch._foreach_add_(list(tensors), list(others), alpha=factor)


def foreach_clamp_max_(tensors: Sequence[Tensor], bound: float) -> None:
    """tensor ← min(tensor, bound)."""
    torch._foreach_clamp_max_(list(tensors), bound)


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False) -> None:
    """Copy each source into its target."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def foreach_lerp(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> list[Tensor]:
    """tensor + weight · (end - tensor)."""
    return list(torch._foreach_lerp(list(tensors), list(ends), weight))


def foreach_lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weights: float | list[Tensor]) -> None:
    """tensor ← tensor + weight · (end - tensor)."""
    torch._foreach_lerp_(list(tensors), list(ends), weights)


def foreach_mul(tensors: Sequence[Tensor], factors: Sequence[Tensor] | Tensor | float) -> list[Tensor]:
    """Each tensor times a number, or times a factor of its own that may be broadcast."""
    return list(torch._foreach_mul(list(tensors), factors))  # type: ignore[arg-type]


def foreach_mul_(tensors: Sequence[Tensor], factors: Sequence[Tensor] | Sequence[float] | Tensor | float) -> None:
    """Multiply each tensor by a number or a one-element tensor, or by a factor of its own that may be broadcast."""
    torch._foreach_mul_(list(tensors), factors)  # type: ignore[arg-type]


def foreach_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each tensor, in fp32."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32))


def foreach_reciprocal_(tensors: Sequence[Tensor], eps: float) -> None:
    """tensor ← 1 / (tensor + eps)."""
    torch._foreach_add_(list(tensors), eps)
    torch._foreach_reciprocal_(list(tensors))


def foreach_add_squares_(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: float) -> None:
    """tensor ← tensor + factor · other²."""
    torch._foreach_addcmul_(list(tensors), list(others), list(others), value=factor)


def foreach_rsqrt(tensors: Sequence[Tensor]) -> list[Tensor]:
    """1 / √tensor."""
    return list(torch._foreach_rsqrt(list(tensors)))


def foreach_sqrt(tensors: Sequence[Tensor]) -> list[Tensor]:
    """√tensor."""
    return list(torch._foreach_sqrt(list(tensors)))
