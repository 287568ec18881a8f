"""Buckets of gradients that are reduced together, and the order in which they are: when they are ready, those first
that the next forward pass needs first."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from weft.comm.algorithms import Start
from weft.comm.axis import Axis
from weft.comm.shards import like, local_of
from weft.parallel.data.compressed_unit import Segment
from weft.planner.engine_constants import GRADIENT_ALIGNMENT

PROFILED_STEP = 3
"""The step that is profiled; those before it compile and warm up."""


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


def send_order(ready: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """The order of buckets over one link, given when each is ready and how long it takes.

    Whenever the link is free, of the ready ones the one is sent that the next forward pass needs first. Buckets are
    numbered from the end of the model, so that is the highest number.
    """
    coming = sorted(range(len(ready)), key=lambda i: (ready[i], i))
    waiting: list[int] = []
    order: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, ready[coming[0]])
        while coming and ready[coming[0]] <= now:
            heapq.heappush(waiting, -coming.pop(0))
        chosen = -heapq.heappop(waiting)
        order.append(chosen)
        now += seconds[chosen]
    return order


class BucketQueue:
    """The order in which all ranks reduce their buckets: first from the end of the model, then by a profiled step.

    Ranks must start reductions in the same order, so the first rank decides once.
    """

    def __init__(self, count: int = 0):
        self.order = list(range(count))
        self.steps = 0
        self.times: dict[int, float] = {}

    def ready(self, number: int) -> None:
        """Record that a bucket is complete."""
        if self.steps == PROFILED_STEP:
            self.times[number] = time.perf_counter()

    def step_over(self, axis: Axis, buckets: Sequence[Tensor]) -> None:
        """Call after all reductions of a step; sets the order after the profiled one."""
        if self.steps == PROFILED_STEP and len(buckets) > 1:
            order = torch.tensor(self._order(buckets), device=buckets[0].device)
            self.order = axis.broadcast(order, 0).tolist()
        self.steps += 1

    def _order(self, buckets: Sequence[Tensor]) -> list[int]:
        if not self.times:  # gradients of a pipeline come without hooks
            return self.order
        ended, began = time.perf_counter(), min(self.times.values())
        whole = sum(flat.numel() for flat in buckets)
        ready = [self.times.get(i, ended) for i in range(len(buckets))]
        return send_order(ready, [(ended - began) * flat.numel() / whole for flat in buckets])
