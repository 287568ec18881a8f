"""What measures the devices of a rank beside its steps. Extensions register kinds of meters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.job.files.run_folder import RunDir
from weft.job.import_by_name import find_object
from weft.job.registry import Registry


@dataclass(frozen=True)
class DeviceFigures:
    """Figures of a rank's devices since the last report; zeros where nothing is measured."""

    joules: float = 0.0
    host_joules: float = 0.0
    watts: float = 0.0
    celsius: float = 0.0
    clock_share: float = 0.0
    utilisation: float = 0.0
    throttled_power: float = 0.0
    throttled_thermal: float = 0.0
    throttled_hardware: float = 0.0


NO_FIGURES = DeviceFigures()


class DeviceMeter(Protocol):
    """Measures the devices of a rank."""

    def figures(self) -> DeviceFigures:
        """Figures since the last call."""

    def metrics(self, seconds: float, tokens: int, rows: Sequence[Any]) -> dict[str, float]:
        """Fields of a step's record on rank 0, from the RankFigures of all ranks."""

    def close(self) -> None:
        """Stop, and restore what was set on the devices."""


class NoMeter:
    """Measures nothing."""

    def figures(self) -> DeviceFigures:
        return NO_FIGURES

    def metrics(self, seconds: float, tokens: int, rows: Sequence[Any]) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


@dataclass(frozen=True)
class DeviceMeterKind:
    """A kind of meter. Functions are named as `module:function`."""

    name: str
    open: str
    """From (job, plan, run, mesh, log) to the DeviceMeter of a rank."""
    restore: str
    """From a run's folder: restores on this machine's devices what killed ranks have left."""


DEVICE_METERS: Registry[DeviceMeterKind] = Registry("device meter", __name__)


def open_meter(*args: Any) -> DeviceMeter:
    """The meter of a rank, from (job, plan, run, mesh, log); one that measures nothing without an extension."""
    kind = next(iter(DEVICE_METERS), None)
    meter: DeviceMeter = NoMeter() if kind is None else find_object(kind.open, "device meter")(*args)
    return meter


def restore_devices(run: RunDir) -> None:
    """Restore what killed ranks of a run have left on this machine's devices."""
    for kind in DEVICE_METERS:
        find_object(kind.restore, "device meter")(run)
