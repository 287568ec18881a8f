"""Measured limits of devices: achieved share of the peak, and number of compute units."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredLimits:
    """Measured limits of one device."""

    matmul: float
    """Best measured bf16 matrix product, as a share of the dense peak."""
    units: int
    """Streaming multiprocessors or compute units."""


# Best matrix products as found by the search of stas00/ml-engineering (compute/accelerator); devices that it lacks
# take the share of their nearest relative.
MEASURED_LIMITS: dict[str, MeasuredLimits] = {
    "v100-sxm-16gb": MeasuredLimits(0.80, 80),
    "v100-sxm-32gb": MeasuredLimits(0.80, 80),
    "a100-sxm-40gb": MeasuredLimits(0.869, 108),
    "a100-sxm-80gb": MeasuredLimits(0.869, 108),
    "a100-pcie-80gb": MeasuredLimits(0.811, 108),
    "h100-sxm": MeasuredLimits(0.803, 132),
    "h100-pcie": MeasuredLimits(0.75, 114),
    "h200-sxm": MeasuredLimits(0.803, 132),
    "gh200": MeasuredLimits(0.838, 132),
    "h800-sxm": MeasuredLimits(0.803, 132),
    "h20": MeasuredLimits(0.90, 78),
    "b200-sxm": MeasuredLimits(0.776, 148),
    "b300-sxm": MeasuredLimits(0.786, 148),
    "gb200": MeasuredLimits(0.729, 148),
    "gb300": MeasuredLimits(0.729, 148),
    "l40s": MeasuredLimits(0.70, 142),
    "a10g": MeasuredLimits(0.80, 72),
    "rtx-4090": MeasuredLimits(0.90, 128),
    "rtx-a6000": MeasuredLimits(0.75, 84),
    "mi250x": MeasuredLimits(0.60, 110),
    "mi300x": MeasuredLimits(0.511, 304),
    "mi325x": MeasuredLimits(0.60, 304),
    "mi350x": MeasuredLimits(0.62, 256),
    "mi355x": MeasuredLimits(0.626, 256),
    "cpu": MeasuredLimits(0.70, 4),
}
DEFAULT_LIMITS = MeasuredLimits(0.75, 128)


def measured_limits(name: str) -> MeasuredLimits:
    """The limits of a device of the catalog, or the defaults."""
    return MEASURED_LIMITS.get(name, DEFAULT_LIMITS)
