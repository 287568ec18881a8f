"""Measures a device's peak rates: matrix products and memory, on random data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.hardware.catalog import find_device
from weft.job.errors import JobError
from weft.measure.timing import timed
from weft.models.kernel_internals import fp8_mm
from weft.planner.plan import Plan
from weft.watch.kernel_profile import Rooflines

MATRIX_ROWS = {"cuda": 8192, "cpu": 1024}
"""Rows of the square matrices: large enough to fill the device."""
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
"""Bytes of the tensor that is copied: far more than a cache."""
BUDGET_S = 0.25


def measure_roofs(plan: Plan, device: torch.device, dtype: torch.dtype) -> Rooflines:
    """Rates of products in the compute dtype (and in fp8 for an fp8 plan) and of copies; the catalog's link."""
    side = MATRIX_ROWS[device.type]
    low = plan.precision == "fp8"
    return Rooflines(
        tflops=_rate(lambda: _product(side, device, dtype), 2.0 * side**3, 1e12, device),
        low_tflops=_rate(lambda: _low_product(side, device), 2.0 * side**3, 1e12, device) if low else None,
        memory_gb_s=_rate(lambda: _copy(device), 2.0 * COPY_BYTES[device.type], 1e9, device),
        link_gb_s=_link(plan),
    )


def _link(plan: Plan) -> float | None:
    """Between two devices of this machine, one way."""
    try:
        return find_device(plan.device_name).link_gb_s if plan.world > 1 else None
    except JobError:  # a device that is not in the catalog
        return None


def _product(side: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    a, b = (torch.randn(side, side, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty(side, side, device=device, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def _low_product(side: int, device: torch.device) -> Callable[[], Tensor]:
    a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: fp8_mm(a, b.t(), one, one, torch.bfloat16, fast=True)


def _copy(device: torch.device) -> Callable[[], Tensor]:
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _rate(make: Callable[[], Callable[[], Tensor]], work: float, unit: float, device: torch.device) -> float | None:
    """Work per second, in units. None where memory or the operation is missing."""
    try:
        return work / timed(make(), device, BUDGET_S) / unit
    except (RuntimeError, ValueError):
        return None
