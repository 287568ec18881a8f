"""Compute dtypes, and the loss scale that keeps fp16 in range."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

COMPUTE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Dtype of weights and activations in the forward and backward pass; master weights and gradient sums are fp32. With
fp8 only products inside the blocks use fp8 (models/fp8/fp8_linear.py)."""

EXPORT_DTYPES: dict[str, torch.dtype] = {name: COMPUTE_DTYPES[name] for name in ("fp32", "bf16", "fp16")}
"""Dtypes of exported weights."""


def choose_cpu_kernels(precision: str = "bf16") -> None:
    """Leave products to OpenBLAS on Arm processors without bf16 products. oneDNN prepares each product anew there,
    which takes 40 times as long as a small product itself, and large ones are slower too; it cannot multiply in bf16,
    of which torch warns with a C++ stack of 20 lines. OpenBLAS has no fast products of bf16 either (200 times as slow
    as in fp32), so those are computed in fp32 and rounded. Called by ranks, whose process is Weft's."""
    if platform.machine() == "aarch64" and "bf16" not in arm_features():
        if precision != "fp32":
            from weft.half_products_internals import multiply_halves_in_fp32

            multiply_halves_in_fp32()
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        torch.backends.nnpack.set_flags(False)  # takes twice as long as OpenBLAS for small convolutions


def arm_features() -> set[str]:
    """The instruction sets that Linux names; empty elsewhere."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {word for line in lines if line.startswith("Features") for word in line.partition(":")[2].split()}


FP16_OVERFLOW = 65520.0
"""The smallest value that fp16 rounds to infinity."""
MIN_LOSS_SCALE = 2.0**-14
"""The smallest loss scale; gradients that overflow here are not finite for another reason."""


@dataclass
class LossScale:
    """Dynamic loss scale (Micikevicius et al. 2018, §3.2): halved when a step overflows, doubled after a while.

    It stays 1 if not `dynamic`: fp32 and bf16 need none.

    A step overflows where an element of the summed gradient, times the scale, is beyond fp16. The gradient of a
    microbatch or a rank is fp16 and only a part of the sum, so testing the parts would make the decision depend on the
    layout.
    """

    dynamic: bool
    value: float = 1.0
    quiet: int = 0
    growth_interval: int = 200
    skipped: int = 0
    limit: float | None = None
    """The bound of an element of a scaled gradient; None: there is none."""

    @classmethod
    def for_precision(cls, precision: str) -> LossScale:
        return cls(True, value=2.0**16, limit=FP16_OVERFLOW) if precision == "fp16" else cls(False)

    def update(self, finite: bool) -> None:
        """Adjust the scale after a step."""
        if not self.dynamic:
            return
        if not finite:
            self.value, self.quiet, self.skipped = max(self.value / 2, MIN_LOSS_SCALE), 0, self.skipped + 1
            return
        self.quiet += 1
        if self.quiet >= self.growth_interval:
            self.value, self.quiet = min(self.value * 2, 2.0**24), 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "quiet": self.quiet, "skipped": self.skipped}

    def restore(self, state: dict[str, float]) -> None:
        if self.dynamic:
            self.value, self.quiet, self.skipped = state["value"], int(state["quiet"]), int(state["skipped"])
