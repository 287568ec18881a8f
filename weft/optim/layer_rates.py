"""Layer-wise learning rates: layers near the input learn more slowly (Howard and Ruder, 2018; Clark et al., 2020)."""

from __future__ import annotations

from collections.abc import Sequence


def layer_rates(names: Sequence[str], units: Sequence[str], decay: float) -> dict[str, float]:
    """The factor on the learning rate of each weight: 1 for what follows the last block, and `decay` times less for
    every block below it. `names` are in the order of the model, `units` the paths of its blocks."""
    depths: dict[str, int] = {}
    seen = 0
    for name in names:
        unit = next((i for i, path in enumerate(units) if name.startswith(f"{path}.")), None)
        seen = seen if unit is None else max(seen, unit + 1)
        depths[name] = unit + 1 if unit is not None else len(units) + 1 if seen == len(units) and units else seen
    return {name: decay ** (len(units) + 1 - depth) for name, depth in depths.items()}


def describe_rates(rates: dict[str, float], decay: float) -> str:
    """A sentence for the log."""
    low, high = min(rates, key=lambda n: rates[n]), max(rates, key=lambda n: rates[n])
    return f"optim.layer_decay {decay:g}: lr × {rates[low]:.3g} for {low}, … lr × {rates[high]:.3g} for {high}"
