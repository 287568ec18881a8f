"""Device prices per hour, from prices.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from weft.hardware.catalog import safe_load
from weft.job.errors import JobError


@cache
def _prices() -> dict[str, Any]:
    return dict(safe_load((Path(__file__).parent / "prices.yaml").read_text(encoding="utf-8")))


def clouds() -> dict[str, dict[str, list[float | None]]]:
    """Prices of every cloud by device: [on demand, spot] in USD per hour."""
    return dict(_prices()["clouds"])


def price_of(device: str, cloud: str | None = None, spot: bool = False) -> float | None:
    """USD per device and hour, the usual price or a cloud's; None if unknown."""
    if cloud is not None and cloud not in clouds():
        raise JobError(f"unknown cloud {cloud!r}; clouds with known prices: {', '.join(clouds())}")
    known = (_prices()["usual"] if cloud is None else clouds()[cloud]).get(device)
    return known[1 if spot else 0] if known else None


def own_terms() -> dict[str, Any]:
    """Terms of owning devices: capital, years, utilisation, power."""
    return dict(_prices()["own"])
