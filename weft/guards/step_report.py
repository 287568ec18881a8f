"""What every rank tells all others of a step: one row of numbers each, summed with the step's other figures."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FIELDS = ("busy", "data", "jump", "changed", "norm", "delay", "idle")
"""Seconds computed, seconds without data, seconds the wall clock jumped, 1 + the number of a weight that changed
between two updates, the gradient norm, which should be the same everywhere, seconds without a core, and seconds that
cores of its machine were idle. After them seconds waited on each axis, then the halves of each kind's checksum."""


@dataclass(frozen=True)
class Row:
    """One rank's figures of one step."""

    busy: float
    data: float
    jump: float
    changed: int
    norm: float
    delay: float
    idle: float
    waited: tuple[float, ...]
    digests: tuple[float, ...]


@dataclass(frozen=True)
class Table:
    """How the rows of all ranks lie in one message."""

    world: int
    axes: tuple[str, ...]
    digests: int
    """Numbers that each rank's checksums take."""

    @property
    def width(self) -> int:
        return len(FIELDS) + len(self.axes) + self.digests

    def message(self, rank: int, head: list[float], row: Row, device: torch.device) -> Tensor:
        """`head` and this rank's row, among zeros where the other ranks' rows will be."""
        values = [row.busy, row.data, row.jump, float(row.changed), row.norm, row.delay, row.idle, *row.waited]
        flat = head + [0.0] * (rank * self.width) + values
        flat += [0.0] * (len(head) + self.world * self.width - len(flat))
        out = torch.tensor(flat, dtype=torch.float64, pin_memory=device.type == "cuda")
        return out.to(device, non_blocking=True)

    def field(self, rank: int, head: int, name: str) -> int:
        """Where in the message one of a rank's numbers lies."""
        return head + rank * self.width + FIELDS.index(name)

    def place(self, rank: int, head: int) -> slice:
        """Where in the message a rank's checksums lie."""
        end = head + (rank + 1) * self.width
        return slice(end - self.digests, end)

    def rows(self, values: list[float]) -> list[Row]:
        """The ranks' rows from what follows the head."""
        fixed, waits = len(FIELDS), len(self.axes)
        out = []
        for rank in range(self.world):
            row = values[rank * self.width : (rank + 1) * self.width]
            busy, data, jump, changed, norm, delay, idle = row[:fixed]
            waited, digests = row[fixed : fixed + waits], row[fixed + waits :]
            out.append(Row(busy, data, jump, round(changed), norm, delay, idle, tuple(waited), tuple(digests)))
        return out
