"""Weights that an optimizer updates together: few launches, and bounded temporary tensors."""

from __future__ import annotations

from collections.abc import Sequence

from weft.planner.engine_constants import UPDATED_ELEMENTS


def batches(sizes: Sequence[int], limit: int = UPDATED_ELEMENTS, least: int = 1) -> list[slice]:
    """Indices of consecutive weights with at most `limit` elements, or of `least` larger ones."""
    found, first, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index - first >= least and filled + size > limit:
            found.append(slice(first, index))
            first, filled = index, 0
        filled += size
    return [*found, slice(first, len(sizes))] if sizes else []
