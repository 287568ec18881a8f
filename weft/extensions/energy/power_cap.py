"""Power limits of GPUs during a run: set by the rank that owns the GPU, restored by it or, if it was killed, later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from weft.hardware.nvml_device import NvmlDevice
from weft.job.errors import MachineError
from weft.job.files.run_folder import RunDir


def _file(run: RunDir, index: int) -> Path:
    return run.path / f".power-limit-{index}.json"


class PowerCap:
    """The power limit of one GPU. The former limit is in a file of the run until it is restored."""

    def __init__(self, device: NvmlDevice, run: RunDir) -> None:
        self.device, self.path = device, _file(run, device.index)

    def set(self, watts: float) -> str:
        """Set the limit. Returns a sentence if that is not possible: training continues without it."""
        former = self.device.limit_w()
        if former is None:
            return f"watch.power_cap_w={watts:g}: GPU {self.device.index} has no power limit"
        if not self.path.exists():  # else an earlier attempt was killed, and the file holds the limit before it
            self.path.write_text(json.dumps({"index": self.device.index, "watts": former}), encoding="utf-8")
        try:
            self.device.set_limit(watts)
        except MachineError as error:
            self.path.unlink(missing_ok=True)
            return f"watch.power_cap_w={watts:g} is not set: {error}"
        return ""

    def restore(self) -> None:
        restore_limit(self.path, self.device)


def restore_limit(path: Path, device: NvmlDevice) -> None:
    try:
        device.set_limit(float(json.loads(path.read_text(encoding="utf-8"))["watts"]))
    except (OSError, ValueError, KeyError, TypeError, MachineError):
        return
    path.unlink(missing_ok=True)


def restore_limits(run: RunDir, open_device: Callable[[int], NvmlDevice] = NvmlDevice) -> None:
    """Restore the limits of this machine's GPUs that killed ranks have left."""
    for path in run.path.glob(".power-limit-*.json"):
        try:
            device = open_device(int(path.stem.rpartition("-")[2]))
        except (ValueError, MachineError):
            continue
        restore_limit(path, device)
