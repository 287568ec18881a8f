"""Counters of energy: the GPU's own (NVML), and those of processors and memory (RAPL, in Linux's powercap tree)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft.hardware.nvml_device import NvmlDevice

POWERCAP = Path("/sys/class/powercap")


class GpuEnergy:
    """Joules of a GPU since the start: its energy counter, or where it has none the integral of its power."""

    def __init__(self, device: NvmlDevice, clock: Callable[[], float] = time.monotonic) -> None:
        self.device, self.clock = device, clock
        self._counter = device.joules()
        self._total = 0.0
        self._last = (clock(), device.watts() or 0.0)

    def read(self) -> float:
        now = self.device.joules()
        if now is not None and self._counter is not None:
            self._total += max(0.0, now - self._counter)  # a driver that was reloaded starts at 0
            self._counter = now
        else:
            at, watts = self.clock(), self.device.watts()
            before, was = self._last
            self._total += (at - before) * ((watts if watts is not None else was) + was) / 2
            self._last = (at, watts if watts is not None else was)
        return self._total


@dataclass
class _Domain:
    path: Path
    highest: float
    """Microjoules after which the counter starts again."""
    before: float

    def new_joules(self) -> float:
        now = _number(self.path / "energy_uj")
        if now is None:
            return 0.0
        since = now - self.before if now >= self.before else now + self.highest - self.before
        self.before = now
        return since / 1e6


class HostEnergy:
    """Joules of the processors of this machine, and of their memory where it has a counter, since the start."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self.domains: list[_Domain] = []
        self.memory = False
        """Whether memory is included."""
        self._total = 0.0
        for path in sorted(root.glob("intel-rapl:*")):  # AMD's driver uses the same names
            name, now = _text(path / "name"), _number(path / "energy_uj")
            outer = path.name.count(":") == 1
            if now is None or not ((outer and name.startswith("package")) or name == "dram"):
                continue  # cores are part of their package, psys contains everything
            self.memory |= name == "dram"
            self.domains.append(_Domain(path, _number(path / "max_energy_range_uj") or 0.0, now))

    def read(self) -> float:
        self._total += sum(domain.new_joules() for domain in self.domains)
        return self._total


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    """A counter; None if it cannot be read: since 2020 only root may."""
    try:
        return float(_text(path))
    except ValueError:
        return None
