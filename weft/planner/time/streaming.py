"""Time of a step whose states are copied to the device and back (optim/streamed_optimizer.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.hardware.measured import Measured
from weft.planner.model.model_facts import Size

LINK_GB_S = {"cpu": 4.0, "cuda": 20.0}
"""Between host and device, each way with both at once, where it was not measured: PCIe 4.0 ×16, or a CPU's copies."""
DISK_READ_GB_S, DISK_WRITE_GB_S = 3.0, 2.0
"""Of an NVMe disk, where it was not measured."""

CODED_STATE_NS = {"cpu": 0.0, "cuda": 0.03}
"""To decode and encode a state of a parameter in an update (H200, bench/tiers_gpu.py)."""
CODED_IN_KERNEL_NS = {"cpu": 0.0, "cuda": 0.004}
"""The same inside of the optimizer's kernel."""


@dataclass(frozen=True)
class Links:
    """Bandwidths in GB/s."""

    host: float
    """Each way, with both at once."""
    beside: float
    """The same while the device computes."""
    disk_read: float = DISK_READ_GB_S
    disk_write: float = DISK_WRITE_GB_S

    @classmethod
    def of(cls, measured: Measured | None, device: str) -> Links:
        """Of a measured device, or the usual ones."""
        if measured is None:
            return cls(LINK_GB_S[device], LINK_GB_S[device])
        host = measured.both_ways_gb_s or 0.9 * (measured.to_device_gb_s or LINK_GB_S[device] / 0.9)
        beside = min(host, measured.beside_gb_s or host)
        read = measured.states_read_gb_s or measured.disk_read_gb_s
        return cls(host, beside, read, measured.states_write_gb_s or measured.disk_write_gb_s)

    def waited_s(self, size: Size, seconds: Size) -> Size:
        """How long the device waits for copies of `size` bytes each way that begin with a computation."""
        return np.maximum(0.0, size - self.beside * 1e9 * seconds) / (self.host * 1e9)


def streamed_step_s(
    step_s: Size, forward_s: Size, host: Size, disk: Size, ahead: Size, links: Links, weights: Size = 0.0
) -> Size:
    """Seconds of a step that would take `step_s` if its states and weights were on the device.

    `host` and `disk` are the bytes that are copied each way. A piece must be on the device before its unit's forward
    pass: up to `ahead` bytes are there when the step begins, and the rest arrives while the units before it run. In all
    other time copies run beside the computation, so a step takes at least as long as its copies. All forward passes of
    a step fetch `weights` bytes, each unit's while the unit before it runs, and so do all backward passes.
    """
    copies = links.waited_s(host + disk + 2 * weights, step_s)
    late = links.waited_s(np.maximum(0.0, host + disk - ahead) + weights, forward_s)
    late = late + links.waited_s(weights, np.maximum(0.0, step_s - forward_s))
    disks = disk / 1e9 * (1 / links.disk_read + 1 / links.disk_write)
    return np.maximum(step_s + np.maximum(late, copies), disks)
