"""The time, rate and utilization of a step."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from weft.launch.rank_pool import RankPool
from weft.training.metrics import StepClock, peak_memory_gib, utilization


@dataclass
class GpuEvent:
    """An event that a GPU reaches at a given second."""

    at: float
    waited: bool = False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: GpuEvent) -> float:
        assert end.waited, "the event may not have been reached"
        return 1e3 * (end.at - self.at)


def marks(times: list[float], gpu: list[Any]) -> list[StepClock]:
    """Marks that the host set at some times, and a GPU reached at others."""
    found = []
    for host, event in zip(times, gpu, strict=True):
        mark = StepClock(torch.device("cpu"))
        mark.host, mark.event = host, event
        found.append(mark)
    return found


def test_a_gpu_times_steps_by_its_own_events() -> None:
    """The host queued the second step 0.01 s after the first, and then waited; the GPU took 0.25 s for each."""
    start, first, second = marks([0.0, 0.20, 0.21], [GpuEvent(0.0), GpuEvent(0.25), GpuEvent(0.5)])
    assert start.seconds_until(first) == pytest.approx(0.25)
    assert first.seconds_until(second) == pytest.approx(0.25)


def test_a_cpu_times_steps_by_the_host() -> None:
    start, end = marks([1.0, 3.5], [None, None])
    assert start.seconds_until(end) == 2.5


def test_utilization_never_exceeds_one() -> None:
    assert utilization(4e12, 2.0, 1e12, 4) == pytest.approx(0.5)
    assert utilization(4e12, 1.0, 1e12, 4) == 1.0
    assert utilization(4e12, 0.5, 1e12, 4) is None
    for flops, seconds, peak in ((None, 1.0, 1e12), (1e12, 0.0, 1e12), (1e12, 1.0, None)):
        assert utilization(flops, seconds, peak, 1) is None


def peaks() -> list[float]:
    """Before and after 256 MiB of its own and 512 MiB that other processes may share."""
    size = 256 * 2**20
    found = [peak_memory_gib(torch.device("cpu"))]
    own = b"1" * size
    with mmap.mmap(-1, 2 * size) as shared:
        shared.write(own)
        shared.write(own)
        found.append(peak_memory_gib(torch.device("cpu")))
    return found


def test_shared_memory_is_not_that_of_a_rank() -> None:
    """A plan does not count the snapshots of a rank; a run of 11 million parameters measured 0.24 GiB more."""
    with RankPool() as own:  # of ranks whose peak is not that of another test
        before, after = own.run(peaks, 1)[0]
    assert before + 0.2 < after < before + 0.3
