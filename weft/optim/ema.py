"""An exponential moving average of the weights, sharded like them."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.foreach_internals import foreach_lerp_
from weft.comm.shards import like, local_of


class Ema:
    """Follows the master weights: average ← decay · average + (1 − decay) · master after every step. Off at decay 0."""

    def __init__(self, master_params: dict[str, Tensor], decay: float, fill: bool = True):
        """Without `fill` the averages get their memory and values later (optim/state_storage.py)."""
        self.decay = decay
        self.master_params = master_params
        copied = (
            master_params.items() if decay else ()
        )  # of shards: cloning a DTensor first derives its sharding, 3 ms each
        self.averages = {n: like(local_of(m.detach()).clone(), m) if fill else m.detach() for n, m in copied}
        self.deferred = False
        """Whether the optimizer updates the averages, each with its weight (optim/streamed_optimizer.py)."""

    @torch.no_grad()
    def update(self, taken: Tensor | None = None) -> None:
        """Update after a step; `taken` is a boolean on the device, false if the step was skipped."""
        if self.averages and not self.deferred:
            averages = [local_of(a) for a in self.averages.values()]
            self.follow(averages, [local_of(self.master_params[n].detach()) for n in self.averages], taken)

    @torch.no_grad()
    def follow(self, averages: list[Tensor], masters: list[Tensor], taken: Tensor | None) -> None:
        """Move some averages, in place, towards their weights."""
        if taken is None:
            foreach_lerp_(averages, masters, 1 - self.decay)
            return
        for average, master in zip(averages, masters, strict=True):
            average.lerp_(master, (1 - self.decay) * taken.float())
