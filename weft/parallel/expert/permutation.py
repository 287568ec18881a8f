"""Permutations of rows on the way to experts, each with its inverse."""

from __future__ import annotations

import torch
from torch import Tensor


def by_expert(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The permutation from rows sorted by rank, then expert, to rows sorted by expert; and its inverse."""
    return sorted_by(torch.arange(counts.shape[1], device=counts.device).expand_as(counts), counts, total)


def swapped(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The permutation from rows in blocks [a, b] to blocks [b, a], and its inverse."""
    a, b = counts.shape
    return sorted_by(torch.arange(a * b, device=counts.device).view(b, a).t(), counts, total)


def sorted_by(keys: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The permutation that sorts blocks of `counts` rows by their keys, and its inverse."""
    order = torch.argsort(torch.repeat_interleave(keys.flatten(), counts.flatten(), output_size=total), stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(total, device=counts.device)
    return order, inverse
