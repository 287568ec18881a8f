"""Gradients of replicas that travel together."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from weft.comm.algorithms import Start
from weft.comm.pieces import local_of
from weft.parallel.compressed import Segment

ALIGN = 64  # elements between gradients in a bucket, so that each begins on a cache line


class Bucket:
    """Gradients that travel together in one buffer, in the order in which the backward pass makes them."""

    def __init__(self, names: list[str], masters: dict[str, Tensor]):
        self.names = names
        sizes = [-(-local_of(masters[n]).numel() // ALIGN) * ALIGN for n in names]
        device = local_of(masters[names[0]]).device
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self.views: dict[str, Tensor] = {}
        self.segments: list[Segment] = []
        for name, size, first in zip(names, sizes, accumulate(sizes, initial=0), strict=False):
            master = local_of(masters[name])
            self.views[name] = self.flat[first : first + size][: master.numel()].view(master.shape)
            self.segments.append(Segment(name, first, master.numel(), master.shape))
        self.missing = len(names)
        self.start: Start | None = None
        """Begins to sum it over the replicas."""
