"""Updates in the backward pass: which units' gradients are complete, and what their updates need."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.memory.released_gradients import ReleasedGradients
from weft.optim.pieces import Piece


@dataclass
class PendingUpdate:
    """A step that is not applied to all weights yet."""

    number: int
    lr: float
    factor: Tensor | None
    taken: Tensor | None
    grads: dict[str, Tensor | None]
    left: deque[Piece]


class UnitsInBackward:
    """Which units are complete in a backward pass whose gradients are released, and what their updates need."""

    def __init__(self, gradients: ReleasedGradients, pieces: list[Piece]):
        self.squares = gradients.squares
        self.pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self.pieces.setdefault(piece.unit, []).append(piece)
        self.units = {s.name: piece.unit for piece in pieces for s in piece.slices if s.name in gradients}
        self.names: dict[str, list[str]] = {}
        for name, unit in self.units.items():
            self.names.setdefault(unit, []).append(name)
        self.missing: dict[str, int] = {}
        self.unit_ready: Callable[[], Callable[[str], None] | None] = lambda: None
        self.step: PendingUpdate | None = None
        gradients.ready = self.gradient_ready

    def in_order(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces in the order of their updates: the last unit's first, what is outside the units last."""
        order = [*reversed([unit for unit in self.pieces if unit]), ""]
        return [piece for unit in order for piece in self.pieces.get(unit, [])]

    def begin(self, step: PendingUpdate, wanted: bool) -> None:
        """Begin the passes of a step, which may be one that is skipped."""
        self.step = step if wanted else None
        self.missing = {unit: len(names) for unit, names in self.names.items()}

    def gradient_ready(self, name: str) -> None:
        """Called when the gradient of a weight is complete."""
        unit = self.units[name]
        self.missing[unit] -= 1
        if not self.missing[unit] and (ready := self.unit_ready()) is not None:
            ready(unit)

    def update_of(self, unit: str) -> PendingUpdate | None:
        """The update of a unit; None: it is skipped, and so are those after it. A GPU decides that by itself."""
        finite = torch.stack([self.squares[n] for n in self.names[unit]]).isfinite().all()
        if self.step is not None and finite.is_cuda:
            taken = finite if self.step.taken is None else finite & self.step.taken
            self.step = replace(self.step, taken=taken)
        elif not finite.is_cuda and not finite:
            self.step = None
        return self.step and replace(self.step, grads={}, left=deque(self.pieces[unit]))
