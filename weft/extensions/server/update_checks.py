"""Checks of a client's update: names, shapes, finite values, and a norm comparable to the other clients'."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

KEPT_NORMS = 50
"""Norms of earlier updates that are kept for rounds with few clients."""


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


class OutlierCheck:
    """Finds updates with a norm far above the others', by kind of tensor: the update and each optimizer state."""

    def __init__(self, tolerance: float):
        self.tolerance = tolerance
        self.norms: dict[str, list[float]] = {}
        """Norms of earlier accepted updates, by kind."""

    def check(self, updates: Mapping[int, Mapping[str, Tensor]], kind: str) -> tuple[dict[int, str], dict[int, float]]:
        """By client, why its update is rejected; and the norms of all updates. `kind` names what clients send."""
        found: dict[int, str] = {}
        sizes: dict[str, dict[int, float]] = {}
        for name, names in self._kinds(updates, kind).items():
            sizes[name] = {c: norm({n: u[n] for n in names}) for c, u in updates.items() if c not in found}
            for client, why in outliers(sizes[name], self.norms.get(name, []), self.tolerance).items():
                found[client] = why if name == kind else f"{name}: {why}"
        for name, by_client in sizes.items():
            kept = [size for client, size in by_client.items() if client not in found]
            self.norms[name] = [*self.norms.get(name, []), *kept][-KEPT_NORMS:]
        return found, sizes.get(kind, {})

    def _kinds(self, updates: Mapping[int, Mapping[str, Tensor]], kind: str) -> dict[str, list[str]]:
        kinds: dict[str, list[str]] = {}
        for name in next(iter(updates.values()), {}):
            kinds.setdefault(name.rpartition(".")[2] if name.startswith("optim.") else kind, []).append(name)
        return kinds
