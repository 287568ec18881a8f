"""What matrices are multiplied in, and the loss scale that keeps fp16 in range."""

from __future__ import annotations

from dataclasses import dataclass

import torch

COMPUTE: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""Dtype of weights and activations in the forward and backward pass; master weights and gradient sums stay fp32. In fp8
only the products inside the blocks are smaller (models/fp8.py)."""

EXPORT: dict[str, torch.dtype] = {name: COMPUTE[name] for name in ("fp32", "bf16", "fp16")}
"""What weights can be written in."""

FLOOR = 2.0**-14
"""The smallest loss scale: what overflows even here is no matter of range."""


@dataclass
class LossScale:
    """Dynamic loss scale (Micikevicius et al. 2018, §3.2): halved when a step overflows, doubled after a while.

    With `dynamic` off it is 1 and stays so: fp32 and bf16 need none.
    """

    dynamic: bool
    value: float = 1.0
    quiet: int = 0
    patience: int = 200
    skipped: int = 0

    @classmethod
    def for_precision(cls, precision: str) -> LossScale:
        return cls(True, value=2.0**16) if precision == "fp16" else cls(False)

    def update(self, finite: bool) -> None:
        """Learn from one step."""
        if not self.dynamic:
            return
        if not finite:
            self.value, self.quiet, self.skipped = max(self.value / 2, FLOOR), 0, self.skipped + 1
            return
        self.quiet += 1
        if self.quiet >= self.patience:
            self.value, self.quiet = min(self.value * 2, 2.0**24), 0

    def state(self) -> dict[str, float]:
        return {"value": self.value, "quiet": self.quiet, "skipped": self.skipped}

    def restore(self, state: dict[str, float]) -> None:
        if self.dynamic:
            self.value, self.quiet, self.skipped = state["value"], int(state["quiet"]), int(state["skipped"])
