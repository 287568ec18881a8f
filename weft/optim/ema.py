"""An exponential moving average of the weights, sharded like them."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.foreach_internals import foreach_lerp_
from weft.comm.shards import local_of


class Ema:
    """Follows the master weights: average ← decay · average + (1 − decay) · master after every step. Off at decay 0."""

    def __init__(self, master_params: dict[str, Tensor], decay: float):
        self.decay = decay
        self.master_params = master_params
        self.averages = {n: m.detach().clone() for n, m in master_params.items()} if decay else {}

    @torch.no_grad()
    def update(self, taken: Tensor | None = None) -> None:
        """Update after a step; `taken` is a boolean on the device, false if the step was skipped."""
        if self.averages and taken is not None:
            for name, average in self.averages.items():
                local_of(average).lerp_(local_of(self.master_params[name].detach()), (1 - self.decay) * taken.float())
        elif self.averages:
            foreach_lerp_(
                [local_of(a) for a in self.averages.values()],
                [local_of(self.master_params[n].detach()) for n in self.averages],
                1 - self.decay,
            )
