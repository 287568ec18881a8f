"""Checks of a client's update: names, shapes, finite values, and a norm comparable to the other clients'."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor


def find_defect(update: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str | None:
    """Why an update is invalid by itself, or None."""
    if foreign := sorted(update.keys() ^ weights.keys()):
        return f"{foreign[0]} is {'missing' if foreign[0] in weights else 'not a weight of this model'}"
    for name, weight in weights.items():
        if update[name].shape != weight.shape:
            return f"{name} has the shape {list(update[name].shape)} instead of {list(weight.shape)}"
        if not update[name].is_floating_point():
            return f"{name} is not a floating-point tensor"
    for name in weights:
        if not bool(torch.isfinite(update[name]).all()):
            return f"{name} contains a value that is not finite"
    return None


def norm(update: Mapping[str, Tensor]) -> float:
    """The 2-norm of all tensors of an update together."""
    return float(torch.stack([t.double().norm() for t in update.values()]).norm())


def outliers(norms: Mapping[int, float], earlier: list[float], tolerance: float) -> dict[int, str]:
    """By client, why its update is too large: its norm exceeds `tolerance` times the median.

    The median is of this round; with fewer than three updates, of earlier accepted updates as well.
    """
    known = [*norms.values(), *(earlier if len(norms) < 3 else [])]
    if len(known) < 3:
        return {}
    middle = statistics.median(known)
    return {
        client: f"its norm is {size:.3g}, {size / middle:.3g} times the median"
        for client, size in norms.items()
        if middle > 0 and size > tolerance * middle
    }
