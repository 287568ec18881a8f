"""Loss spikes: a step whose loss or gradient norm is far outside the recent range.

A value's deviation is its distance from the median of the values before it. It is a spike if it exceeds both ten times
the median absolute deviation and three times the largest deviation of the recent steps. Where the loss is small
compared with that of the first steps, as a classifier's becomes, one unusual sample multiplies it: what stays small on
that scale is no spike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

BASELINE_STEPS = 8
"""Values whose median is the expected next value."""
WINDOW, MIN_SAMPLES = 64, 16
"""Deviations kept, and how many are needed before a value is scored."""
LOSS_FLOOR = 0.25
"""A loss increase below this share of the loss is never a spike."""
START_FLOOR = 0.05
"""A loss increase below this share of the loss of the first steps is never a spike; nor is, where the loss itself is
below it, a norm that is not above those of the first steps."""
NORM_FLOOR = math.log(30)
"""Floor for the log of the norm; clipping handles smaller outliers, and a bad batch shows in the loss."""
JOINT_FLOORS = (0.05, math.log(3))
"""The two floors when loss and norm deviate in the same step: an untrained model's loss rises little."""
SUSPECT_SHARE = 0.35
"""A step whose norm reached this share of a spike, and more than the next step's, is blamed if the next step's loss is
a spike."""
REPLAY_STEPS = WINDOW + BASELINE_STEPS + 1
"""Steps needed to restore the detector's state."""
MAX_SPIKES, SPIKE_SPAN_STEPS = 3, 50
"""This many spikes within this many steps mean that the data or the run has changed; they become the new normal."""


class Deviations:
    """One series of values and their deviations."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=BASELINE_STEPS)
        self.deviations: deque[float] = deque(maxlen=WINDOW)

    def score(self, value: float, floor: float) -> float:
        """The deviation relative to the limit; from 1 on it is a spike. 0 while too little is known."""
        if len(self.deviations) < MIN_SAMPLES:
            return 0.0
        middle = statistics.median(self.deviations)
        spread = 1.4826 * statistics.median(abs(s - middle) for s in self.deviations)
        limit = max(floor, 10 * spread, 3 * max(self.deviations))
        return (value - statistics.median(self.values)) / limit

    def add(self, value: float) -> None:
        if len(self.values) == BASELINE_STEPS:
            self.deviations.append(value - statistics.median(self.values))
        self.values.append(value)


@dataclass(frozen=True)
class Spike:
    """A step to undo, and why."""

    step: int
    why: str


class SpikeDetector:
    """Checks the loss and gradient norm of every step, the same on all ranks."""

    def __init__(self) -> None:
        self._forget()
        self.first: list[tuple[float, float]] = []
        """Loss and log of the norm of the first steps."""
        self.undone: deque[int] = deque(maxlen=MAX_SPIKES)

    def _forget(self) -> None:
        self.loss, self.norm = Deviations(), Deviations()
        self.suspect: tuple[int, float] | None = None
        """The last step and the score of its norm, if that is high."""

    def learn(self, loss: float, norm: float) -> None:
        """Add a step that is not a spike."""
        self.begin(loss, norm)
        self.loss.add(loss)
        self.norm.add(math.log(max(norm, 1e-30)))

    def begin(self, loss: float, norm: float) -> None:
        """Add a step to the first ones, if they are not complete."""
        if len(self.first) < BASELINE_STEPS:
            self.first.append((loss, math.log(max(norm, 1e-30))))

    def detect(self, step: int, loss: float, norm: float) -> Spike | None:
        """The spike to undo after this step, or None; a normal step is added to the history."""
        size = math.log(max(norm, 1e-30))
        usual = statistics.median(self.loss.values) if self.loss.values else loss
        losses, norms = zip(*self.first, strict=True) if self.first else ((0.0,), (0.0,))
        floor = START_FLOOR * abs(statistics.median(losses))
        small = abs(usual) < floor
        by_loss = self.loss.score(loss, max(floor, LOSS_FLOOR * abs(usual)))
        by_norm = 0.0 if small and size < max(norms) else self.norm.score(size, NORM_FLOOR)
        joint = floor if small else JOINT_FLOORS[0] * abs(usual)
        by_both = min(self.loss.score(loss, joint), self.norm.score(size, JOINT_FLOORS[1]))
        if max(by_loss, by_norm, by_both) < 1:
            self.suspect = (step, by_norm) if by_norm > SUSPECT_SHARE else None
            self.learn(loss, norm)
            return None
        before, score = self.suspect or (step, 0.0)
        bad = before if before == step - 1 and max(by_norm, by_both) < 1 and by_norm < score else step
        if step - 1 in self.undone:  # its batch was skipped, so the damage is older
            bad = min(self.undone) - 1
        if len(self.undone) == MAX_SPIKES and step - self.undone[0] < SPIKE_SPAN_STEPS:
            self._forget()
            return None
        self.undone.append(bad)
        surprised = max(by_loss, by_both) >= 1
        what = f"the loss went from about {usual:.3g} to {loss:.3g}" if surprised else f"its norm is {norm:.3g}"
        return Spike(bad, f"{what} at step {step}")
