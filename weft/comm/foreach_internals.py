"""Private torch names for operations on lists of tensors, which launch one kernel for many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROW_LENGTH = 256
"""Squares that a CPU adds one after the other in fp32."""
DIRECT_ELEMENTS = 1024
"""CPUs sum tensors up to this size in fp64: fewer calls, but each element takes 20 times as long."""


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


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each tensor, [tensors] in fp64, right to 7 digits whatever their sizes.

    torch's norm adds squares one after the other in fp32 on CPUs, and loses 0.4 % of 50 million of them. Here only
    ROW_LENGTH squares are added that way, as on GPUs, where each block adds some and their sums are added pairwise.
    """
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=_sum_dtype(tensors))).double().square()
    parts = [_row_norms(t) if t.numel() > DIRECT_ELEMENTS else t for t in tensors]
    ends = {i: _end(t) for i, t in enumerate(tensors) if t.numel() > DIRECT_ELEMENTS and t.numel() % ROW_LENGTH}
    norms = torch.stack(torch._foreach_norm([*parts, *ends.values()], 2, dtype=torch.float64))
    squares, of_ends = norms.square_().split([len(parts), len(ends)])
    return squares.index_add_(0, torch.tensor(list(ends)), of_ends) if ends else squares


def largest_of(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute value in any of the tensors; 0 if they are empty."""
    parts = [t for t in tensors if t.numel()]
    if not parts:
        return tensors[0].new_zeros((), dtype=torch.float32)
    return torch.stack(torch._foreach_norm(parts, torch.inf, dtype=_sum_dtype(parts))).max()


def _row_norms(tensor: Tensor) -> Tensor:
    """The norms of the whole rows of ROW_LENGTH elements into which a tensor's memory can be cut."""
    flat = _flat(tensor)
    rows = flat[: flat.numel() // ROW_LENGTH * ROW_LENGTH].view(-1, ROW_LENGTH)
    return torch.linalg.vector_norm(rows, dim=1, dtype=_sum_dtype([tensor]))


def _end(tensor: Tensor) -> Tensor:
    """The elements after the last whole row."""
    return _flat(tensor)[-(tensor.numel() % ROW_LENGTH) :]


def _flat(tensor: Tensor) -> Tensor:
    """A tensor's elements in the order of its memory, without a copy unless it has gaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).reshape(-1)


def sums_of_squares_along(tensor: Tensor, dim: int) -> Tensor:
    """The sums of squares along a dim (counted from the last, -1), which is kept with size 1, as sums_of_squares()."""
    dtype, length = _sum_dtype([tensor]), tensor.shape[dim]
    if tensor.is_cuda or length <= ROW_LENGTH:
        return torch.linalg.vector_norm(tensor, dim=dim, keepdim=True, dtype=dtype).square()
    end = length // ROW_LENGTH * ROW_LENGTH
    rows = tensor.narrow(dim, 0, end).unflatten(dim, (-1, ROW_LENGTH))
    norms = torch.linalg.vector_norm(rows, dim=dim, dtype=dtype)
    rest = torch.linalg.vector_norm(tensor.narrow(dim, end, length - end), dim=dim, keepdim=True, dtype=dtype)
    return norms.square_().sum(dim, keepdim=True) + rest.square_()


def _sum_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
