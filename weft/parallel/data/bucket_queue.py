"""In which order buckets of gradients leave: as they are ready, and of those that are, what the next forward needs."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.axis import Axis

PROFILED_STEP = 3
"""The step whose times decide; those before it compile and warm up."""


def send_order(ready: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """Buckets one after the other over one link, that are ready at these times and take so long each.

    Whenever the link is free, of those that are ready the one goes that the next forward pass needs first: buckets are
    numbered from the model's end, so the highest number.
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
    """One order for all ranks, in which buckets leave: at first from the model's end, then as one step showed.

    Ranks must begin their sums in the same order, so the order is the first rank's, and then stays.
    """

    def __init__(self, count: int = 0):
        self.order = list(range(count))
        self.steps = 0
        self.times: dict[int, float] = {}

    def ready(self, number: int) -> None:
        """A bucket's last gradient has come."""
        if self.steps == PROFILED_STEP:
            self.times[number] = time.perf_counter()

    def step_over(self, axis: Axis, buckets: Sequence[Tensor]) -> None:
        """All sums are there; learn from the step that is to be learned from."""
        if self.steps == PROFILED_STEP and len(buckets) > 1:
            told = torch.tensor(self._order(buckets), device=buckets[0].device)
            self.order = axis.broadcast(told, 0).tolist()
        self.steps += 1

    def _order(self, buckets: Sequence[Tensor]) -> list[int]:
        if not self.times:  # a pipeline brings gradients without their hooks
            return self.order
        ended, began = time.perf_counter(), min(self.times.values())
        whole = sum(flat.numel() for flat in buckets)
        ready = [self.times.get(i, ended) for i in range(len(buckets))]
        return send_order(ready, [(ended - began) * flat.numel() / whole for flat in buckets])
