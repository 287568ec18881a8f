"""What is wrong with a client's update: a shape, a number that is none, or a size far from the others'."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor


def flaw(update: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str | None:
    """Why an update cannot be taken, whatever the others are like."""
    if foreign := sorted(update.keys() ^ weights.keys()):
        return f"{foreign[0]} is {'missing' if foreign[0] in weights else 'no weight of this model'}"
    for name, weight in weights.items():
        if update[name].shape != weight.shape:
            return f"{name} has the shape {list(update[name].shape)} instead of {list(weight.shape)}"
        if not update[name].is_floating_point():
            return f"{name} is not made of real numbers"
    for name in weights:
        if not bool(torch.isfinite(update[name]).all()):
            return f"{name} holds a number that is not finite"
    return None


def norm(update: Mapping[str, Tensor]) -> float:
    """The 2-norm of an update as a whole."""
    return float(torch.stack([t.double().norm() for t in update.values()]).norm())


def outliers(norms: Mapping[int, float], earlier: list[float], tolerance: float) -> dict[int, str]:
    """By client, why an update is too large: its norm exceeds the median so many times.

    The median is of this round; where it has fewer than three updates, of those taken before as well.
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
