"""Live bytes on the way through a step, their peak, and the components at the peak."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.planner.model.model_facts import Size

PARTS = ("parameters", "gradients", "optimizer", "activations", "communication", "temporary", "runtime")
"""Components of a rank's memory; they add up to the total."""


class Walk:
    """Live bytes and their peak; with `detail`, by component."""

    def __init__(self, base: dict[str, Size], detail: bool):
        self.live: Size = sum(base.values())
        self._peak: Size = self.live
        self._rises = False
        """Whether live bytes are more than at the last comparison with the peak, which waits until they fall."""
        zero = 0.0 * self.live
        self.parts = {part: base.get(part, 0.0) + zero for part in PARTS} if detail else {}
        self.at_peak = dict(self.parts)
        self.on: Size | None = None
        """0 for layouts that the current unit does not exist in; None: it exists in all."""

    @property
    def peak(self) -> Size:
        self.settle()
        return self._peak

    def settle(self) -> None:
        """Compare the peak with what is live."""
        if self._rises:
            self._peak, self._rises = np.maximum(self._peak, self.live), False

    def restart(self, live: dict[str, Size]) -> None:
        """Continue with other live bytes."""
        self.settle()
        self.on, self.live = None, sum(live.values())
        self.parts = {part: live.get(part, 0.0) + 0.0 * self.live for part in self.parts}

    def add(self, size: Size, part: str) -> None:
        """Bytes that are allocated: from 0 up."""
        size = size if self.on is None else size * self.on
        self.live = self.live + size
        if self.parts:
            self.parts[part] = self.parts[part] + size
            self._mark(0.0, part)
        else:
            self._rises = True

    def change(self, size: Size, part: str) -> None:
        """The same where as many or more bytes may be freed."""
        self.settle()
        self.add(size, part)

    def free(self, size: Size, part: str) -> None:
        """The same for bytes that are freed, which cannot make a peak."""
        self.settle()
        size = size if self.on is None else size * self.on
        self.live = self.live - size
        if self.parts:
            self.parts[part] = self.parts[part] - size

    def chosen(self, new: Size, old: Size) -> Size:
        """The new value of layouts that the current unit exists in, the old one of the others."""
        return new if self.on is None else old + (new - old) * self.on

    def flash(self, size: Size, part: str = "temporary") -> None:
        """Bytes that are allocated and freed at once: from 0 up."""
        size = size if self.on is None else size * self.on
        if self.parts:
            self._mark(size, part)
        else:
            self._peak, self._rises = np.maximum(self._peak, self.live + size), False

    def _mark(self, extra: Size, part: str) -> None:
        total = self.live + extra
        higher = total > self._peak
        if not np.any(higher):
            return
        for name, size in self.parts.items():
            size = size + extra if name == part else size
            self.at_peak[name] = np.where(higher, size, self.at_peak[name])
        self._peak = np.where(higher, total, self._peak)

    def repeat(self, count: Size, body: Callable[[Size], None]) -> None:
        """Trace `count` equal units: the first, the second, and the last after a jump over those between.

        The body is given 1 for the last unit, else 0.
        """
        outer, fewest, most = self.on, np.min(count), np.max(count)
        for number in (1, 2, 3):
            if number > most:
                break
            if number > fewest:
                self.on = (count >= number) * (1.0 if outer is None else outer)
            live, parts = self.live, dict(self.parts)
            body(1.0 if number == 3 or number >= most else 0.0 if number < fewest else (count <= number) * 1.0)
            if number == 2 and most > 3:
                jump = np.maximum(count - 3, 0)
                self.parts = {name: size + jump * (size - parts[name]) for name, size in self.parts.items()}
                self.live = self.live + jump * (self.live - live)
        self.on = outer
