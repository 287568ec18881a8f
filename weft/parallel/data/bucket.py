"""Buckets of gradients that are reduced together."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from weft.comm.algorithms import Start
from weft.comm.shards import like, local_of
from weft.parallel.data.compressed_unit import Segment
from weft.planner.engine_constants import GRADIENT_ALIGNMENT


class Bucket:
    """Gradients that share a buffer, in the order in which the backward pass computes them.

    The first gradient of a weight in a step is copied into the buffer and the next are added, so the buffer need not be
    cleared.
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
        """The views in the layout of the master weights, for their .grad."""
        self.stale: set[str] = set()
        """Weights whose view still holds the gradient of the last step."""
        self.missing = len(names)
        self.start: Start | None = None
        """Starts to sum it over the replicas."""

    def add(self, name: str, grad: Tensor) -> None:
        """Add a gradient of this step."""
        if name in self.stale:
            self.put(name, grad)
        else:
            self.views[name].add_(grad)

    def put(self, name: str, grad: Tensor) -> None:
        """Set the gradient of this step."""
        self.stale.discard(name)
        self.views[name].copy_(grad)

    def clear_stale(self) -> None:
        """Zero the gradients of weights that got none in this step."""
        for name in self.stale:
            self.views[name].zero_()
        self.stale.clear()
