"""Watches this rank's GPU, and on the first rank of a machine its processors, in a thread of its own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.extensions.energy.energy_sources import POWERCAP, GpuEnergy, HostEnergy
from weft.extensions.energy.health import LIMITS, GpuHealth
from weft.hardware.nvml_device import GpuSample, NvmlDevice
from weft.job.errors import MachineError
from weft.watch.device_meters import NO_FIGURES, DeviceFigures

INTERVAL_S = 1.0
"""Time between two samples. A look takes about a millisecond."""


class DeviceMonitor:
    """Samples until close(). A failure of the driver ends the sampling and nothing else."""

    def __init__(
        self, device: NvmlDevice | None, host: HostEnergy | None, report: Callable[[str, str], None],
        interval_s: float = INTERVAL_S,
    ) -> None:  # fmt: skip
        self.device, self.host = device, host
        self.gpu = GpuEnergy(device) if device is not None else None
        self.health = GpuHealth(device, report) if device is not None else None
        self.sample = GpuSample()
        self._joules = self._host_joules = 0.0
        self._reported = (0.0, 0.0)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        if device is not None or (host is not None and host.domains):
            args = (weakref.ref(self), self._end, interval_s)
            self._thread = threading.Thread(target=_sample, args=args, name="weft-devices", daemon=True)
            self._thread.start()

    def look(self) -> None:
        """Take one sample."""
        if self.device is not None and self.gpu is not None and self.health is not None:
            self.sample = self.device.sample()
            self._joules = self.gpu.read()
            self.health.look(self.sample)
        if self.host is not None:
            self._host_joules = self.host.read()

    def figures(self) -> DeviceFigures:
        """Energy since the last call, and the newest sample."""
        if self._thread is None:
            return NO_FIGURES
        now, before = (self._joules, self._host_joules), self._reported
        self._reported = now
        s, health = self.sample, self.health
        shares = [health.share(kind) if health is not None else 0.0 for kind in LIMITS]
        if health is not None and not health.device.limit_is_lowered():
            shares[0] = 0.0  # full load, not a limit that somebody has set
        return DeviceFigures(
            now[0] - before[0], now[1] - before[1], s.watts or 0.0, s.celsius or 0.0, s.clock_share or 0.0,
            s.utilisation or 0.0, *shares,
        )  # fmt: skip

    def close(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * INTERVAL_S)


def _sample(monitor: weakref.ref[DeviceMonitor], end: threading.Event, interval_s: float) -> None:
    """Sample until the monitor is closed or no longer used, as after a fault."""
    while True:
        here = monitor()
        if here is None:
            return
        try:
            here.look()
        except Exception:  # such as a GPU that has fallen off the bus
            return
        del here
        if end.wait(interval_s):
            return


def open_monitor(
    cuda_uuid: str | None, owns_gpu: bool, first_of_machine: bool, report: Callable[[str, str], None],
    root: Path = POWERCAP,
) -> DeviceMonitor:  # fmt: skip
    """The monitor of a rank. `owns_gpu`: no other rank watches the same GPU."""
    device: NvmlDevice | None = None
    if cuda_uuid is not None and owns_gpu:
        try:
            device = NvmlDevice(uuid=cuda_uuid)
        except MachineError:
            device = None
    return DeviceMonitor(device, HostEnergy(root) if first_of_machine else None, report)


def gpu_uuid(properties: Any) -> str | None:
    """The UUID of a device as NVML spells it, from torch's properties."""
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"
