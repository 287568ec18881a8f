"""Loss spikes: a step whose loss or gradient norm has left everything the run has shown so far.

Each value is held against the median of the few before it, so a loss that falls is no news, and its surprise against
those of the last steps: ten times their median deviation, and three times the largest of them. What small noisy runs
do in the ordinary course is inside both.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

BEFORE = 8
"""Values whose median is what is expected next."""
WINDOW, LEAST = 64, 16
"""Surprises that are remembered, and how many must be known before one is judged."""
LOSS_FLOOR = 0.25
"""A loss that is up by less than this share of itself is no spike, however calm the run was."""
NORM_FLOOR = math.log(30)
"""Norms are compared by ratio. Clipping tames what is smaller, and a bad batch of that kind shows in the loss."""
TOGETHER = (0.05, math.log(3))
"""The same two floors where loss and norm leave what they have shown in one step: a model that knows little yet cannot
be much surprised."""
UNEASY = 0.35
"""A step whose norm went this share of the way to a spike is to blame if the next step's loss is one."""
RECALLED = WINDOW + BEFORE + 1
"""Steps from which all that is known can be learned again."""
PATIENCE, MEMORY = 3, 50
"""So many spikes within so many steps are no accident: the data or the run has changed, and that is the new normal."""


class Surprises:
    """One series, and how far each next value is from what the last ones let expect."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=BEFORE)
        self.surprises: deque[float] = deque(maxlen=WINDOW)

    def judge(self, value: float, floor: float) -> float:
        """From 1 up it is a spike; 0 as long as too little is known."""
        if len(self.surprises) < LEAST:
            return 0.0
        middle = statistics.median(self.surprises)
        spread = 1.4826 * statistics.median(abs(s - middle) for s in self.surprises)
        limit = max(floor, 10 * spread, 3 * max(self.surprises))
        return (value - statistics.median(self.values)) / limit

    def add(self, value: float) -> None:
        if len(self.values) == BEFORE:
            self.surprises.append(value - statistics.median(self.values))
        self.values.append(value)


@dataclass(frozen=True)
class Spike:
    """A step to undo, and why."""

    step: int
    why: str


class Spikes:
    """Reads every step's loss and gradient norm, the same on all ranks."""

    def __init__(self) -> None:
        self._forget()
        self.undone: deque[int] = deque(maxlen=PATIENCE)

    def _forget(self) -> None:
        self.loss, self.norm = Surprises(), Surprises()
        self.uneasy: int | None = None

    def learn(self, loss: float, norm: float) -> None:
        """A step that was found to be in order, by whoever judged it."""
        self.loss.add(loss)
        self.norm.add(math.log(max(norm, 1e-30)))

    def judge(self, step: int, loss: float, norm: float) -> Spike | None:
        """What must be undone after this step; None, and the step is learned from, in the ordinary course."""
        size = math.log(max(norm, 1e-30))
        usual = statistics.median(self.loss.values) if self.loss.values else loss
        by_loss = self.loss.judge(loss, LOSS_FLOOR * abs(usual))
        by_norm = self.norm.judge(size, NORM_FLOOR)
        by_both = min(self.loss.judge(loss, TOGETHER[0] * abs(usual)), self.norm.judge(size, TOGETHER[1]))
        if max(by_loss, by_norm, by_both) < 1:
            self.uneasy = step if by_norm > UNEASY else None
            self.learn(loss, norm)
            return None
        bad = self.uneasy if self.uneasy == step - 1 and max(by_norm, by_both) < 1 else step
        if step - 1 in self.undone:  # its batch was not learned from, so the damage was done before
            bad = min(self.undone) - 1
        if len(self.undone) == PATIENCE and step - self.undone[0] < MEMORY:
            self._forget()
            return None
        self.undone.append(bad)
        surprised = max(by_loss, by_both) >= 1
        what = f"the loss went from about {usual:.3g} to {loss:.3g}" if surprised else f"its norm is {norm:.3g}"
        return Spike(bad, f"{what} at step {step}")
