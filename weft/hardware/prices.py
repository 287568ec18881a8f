"""What a device costs an hour: the facts of prices.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from weft.job.errors import JobError


@cache
def _prices() -> dict[str, Any]:
    return dict(yaml.safe_load((Path(__file__).parent / "prices.yaml").read_text(encoding="utf-8")))


def clouds() -> dict[str, dict[str, list[float | None]]]:
    """Every cloud's devices, each with its price on demand and as spot, USD an hour."""
    return dict(_prices()["clouds"])


def price_of(device: str, cloud: str | None = None, spot: bool = False) -> float | None:
    """USD for one device and hour, the usual one or a cloud's; None where no price is known."""
    if cloud is not None and cloud not in clouds():
        raise JobError(f"no cloud is named {cloud!r}; clouds with known prices: {', '.join(clouds())}")
    known = (_prices()["usual"] if cloud is None else clouds()[cloud]).get(device)
    return known[1 if spot else 0] if known else None


def own_terms() -> dict[str, Any]:
    """What owning devices costs: capital, years, utilisation, power."""
    return dict(_prices()["own"])
