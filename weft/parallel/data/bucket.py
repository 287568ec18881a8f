"""Gradients of replicas that travel together."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from weft.comm.algorithms import Start
from weft.comm.shards import like, local_of
from weft.parallel.data.compression import Segment
from weft.planner.engine_constants import GRADIENT_ALIGNMENT


class Bucket:
    """Gradients that travel together in one buffer, in the order in which the backward pass makes them.

    A step's first gradient of a weight is copied into its place and the next are added: what the step before left need
    not be cleared.
    """

    def __init__(self, names: list[str], master_params: dict[str, Tensor]):
        self.names = names
        sizes = [-(-local_of(master_params[n]).numel() // GRADIENT_ALIGNMENT) * GRADIENT_ALIGNMENT for n in names]
        device = local_of(master_params[names[0]]).device
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self.views: dict[str, Tensor] = {}
        self.segments: list[Segment] = []
        for name, size, first in zip(names, sizes, accumulate(sizes, initial=0), strict=False):
            master = local_of(master_params[name])
            self.views[name] = self.flat[first : first + size][: master.numel()].view(master.shape)
            self.segments.append(Segment(name, first, master.numel(), master.shape))
        self.grads = {name: like(view, master_params[name]) for name, view in self.views.items()}
        """The places as what a master's .grad may be."""
        self.stale: set[str] = set()
        """Weights whose place still holds the gradient of the step before."""
        self.missing = len(names)
        self.start: Start | None = None
        """Begins to sum it over the replicas."""

    def add(self, name: str, grad: Tensor) -> None:
        """One more gradient of this step."""
        if name in self.stale:
            self.put(name, grad)
        else:
            self.views[name].add_(grad)

    def put(self, name: str, grad: Tensor) -> None:
        """All there is of this step's gradient so far."""
        self.stale.discard(name)
        self.views[name].copy_(grad)

    def clear_stale(self) -> None:
        """Weights of which no gradient came have one of zeros."""
        for name in self.stale:
            self.views[name].zero_()
        self.stale.clear()
