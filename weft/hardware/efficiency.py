"""What devices were measured to reach, as shares of their peaks, and how many tiles they compute at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reach:
    """Measured limits of one device."""

    matmul: float
    """The best bf16 matrix product found, over the dense peak."""
    units: int
    """Streaming multiprocessors or compute units."""


# Best matrix products as found by the search of stas00/ml-engineering (compute/accelerator); devices that it lacks
# take the share of their nearest relative.
REACH: dict[str, Reach] = {
    "v100-sxm-16gb": Reach(0.80, 80),
    "v100-sxm-32gb": Reach(0.80, 80),
    "a100-sxm-40gb": Reach(0.869, 108),
    "a100-sxm-80gb": Reach(0.869, 108),
    "a100-pcie-80gb": Reach(0.811, 108),
    "h100-sxm": Reach(0.803, 132),
    "h100-pcie": Reach(0.75, 114),
    "h200-sxm": Reach(0.803, 132),
    "gh200": Reach(0.838, 132),
    "h800-sxm": Reach(0.803, 132),
    "h20": Reach(0.90, 78),
    "b200-sxm": Reach(0.776, 148),
    "b300-sxm": Reach(0.786, 148),
    "gb200": Reach(0.729, 148),
    "gb300": Reach(0.729, 148),
    "l40s": Reach(0.70, 142),
    "a10g": Reach(0.80, 72),
    "rtx-4090": Reach(0.90, 128),
    "rtx-a6000": Reach(0.75, 84),
    "mi250x": Reach(0.60, 110),
    "mi300x": Reach(0.511, 304),
    "mi325x": Reach(0.60, 304),
    "mi350x": Reach(0.62, 256),
    "mi355x": Reach(0.626, 256),
    "cpu": Reach(0.70, 4),
}
USUAL = Reach(0.75, 128)


def reach_of(name: str) -> Reach:
    """The limits of a device of the catalog, or usual ones."""
    return REACH.get(name, USUAL)
