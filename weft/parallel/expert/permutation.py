"""The orders in which rows lie on their way to experts: each with the way back."""

from __future__ import annotations

import torch
from torch import Tensor


def by_expert(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The order that brings rows sorted by rank, and then by expert, into that of experts; and the way back."""
    return sorted_by(torch.arange(counts.shape[1], device=counts.device).expand_as(counts), counts, total)


def swapped(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The order that brings rows in blocks [a, b] into blocks [b, a], and the way back."""
    a, b = counts.shape
    return sorted_by(torch.arange(a * b, device=counts.device).view(b, a).t(), counts, total)


def sorted_by(keys: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The order that sorts blocks of rows, so many in each, by the keys of the blocks; and the way back."""
    order = torch.argsort(torch.repeat_interleave(keys.flatten(), counts.flatten(), output_size=total), stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(total, device=counts.device)
    return order, inverse
