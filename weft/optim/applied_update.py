"""What an update was computed from, so that it can be repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AppliedUpdate:
    """An update of weights. The same state and the same update give the same bits."""

    lr: float
    factor: Tensor
    """Multiplied with the gradients."""
    taken: Tensor
    """0 if the step was skipped, else 1."""
    grads: Mapping[str, Tensor]
    """By the name of a weight."""
