"""The order in which buckets are reduced: when they are ready, those first that the next forward pass needs first."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.axis import Axis

PROFILED_STEP = 3
"""The step that is profiled; those before it compile and warm up."""


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
