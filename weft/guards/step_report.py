"""The figures that every rank reports of a step, summed over all ranks in one message."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from weft.watch.device_meters import NO_FIGURES, DeviceFigures

DEVICE_FIELDS = tuple(f.name for f in fields(DeviceFigures))
"""Figures of a rank's devices."""
FIELDS = ("busy", "data", "jump", "changed", "delay", "idle", "cpu", "slack", "memory", *DEVICE_FIELDS)
"""Seconds computing, seconds waiting for data, wall clock jump, 1 + index of a weight that changed between updates,
seconds without a core, idle seconds of the machine's cores, processor seconds of this process, seconds in which the
host waited for the device, peak memory in GiB, and figures of the devices. Followed by the seconds waited on each axis
and the checksums of each kind."""


@dataclass(frozen=True)
class RankFigures:
    """One rank's figures of one step."""

    busy: float
    data: float
    jump: float
    changed: int
    delay: float
    idle: float
    cpu: float
    slack: float
    memory: float
    waited: tuple[float, ...]
    digests: tuple[float, ...]
    devices: DeviceFigures = NO_FIGURES


@dataclass(frozen=True)
class FigureLayout:
    """Layout of all ranks' figures in one message."""

    world: int
    axes: tuple[str, ...]
    digests: int
    """Numbers in each rank's checksums."""

    @property
    def width(self) -> int:
        return len(FIELDS) + len(self.axes) + self.digests

    def message(self, rank: int, head: list[float], row: RankFigures, device: torch.device) -> Tensor:
        """`head` and this rank's figures, with zeros for the other ranks."""
        own = [float(getattr(row, name)) for name in FIELDS[: -len(DEVICE_FIELDS)]]
        values = [*own, *vars(row.devices).values(), *row.waited]
        flat = head + [0.0] * (rank * self.width) + values
        flat += [0.0] * (len(head) + self.world * self.width - len(flat))
        out = torch.tensor(flat, dtype=torch.float64, pin_memory=device.type == "cuda")
        return out.to(device, non_blocking=True)

    def field(self, rank: int, head: int, name: str) -> int:
        """Index of one of a rank's figures in the message."""
        return head + rank * self.width + FIELDS.index(name)

    def place(self, rank: int, head: int) -> slice:
        """Position of a rank's checksums in the message."""
        end = head + (rank + 1) * self.width
        return slice(end - self.digests, end)

    def rows(self, values: list[float]) -> list[RankFigures]:
        """The figures of all ranks, from the values after the head."""
        fixed, waits = len(FIELDS), len(self.axes)
        out = []
        for rank in range(self.world):
            row = values[rank * self.width : (rank + 1) * self.width]
            found: dict[str, Any] = dict(zip(FIELDS, row[:fixed], strict=True))
            waited, digests = tuple(row[fixed : fixed + waits]), tuple(row[fixed + waits :])
            devices = DeviceFigures(*(found.pop(name) for name in DEVICE_FIELDS))
            found["changed"] = round(found["changed"])
            out.append(RankFigures(**found, waited=waited, digests=digests, devices=devices))
        return out


@dataclass(frozen=True)
class StepFigures:
    """A step's figures, the same on all ranks."""

    number: int
    loss: float
    norm: float
    taken: bool
    loss_scale: float
    count: float = 1.0
    """Valid targets."""
