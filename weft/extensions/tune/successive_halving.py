"""Successive halving (Jamieson and Talwalkar 2016): short trials, of which the best are continued."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Sampler(Protocol):
    """Proposes values of a trial, and learns from losses."""

    learns: bool
    """Whether proposals depend on the losses of earlier ones."""

    def ask(self) -> dict[str, Any]: ...

    def tell(self, values: dict[str, Any], loss: float) -> None: ...


@dataclass
class Trial:
    """One set of values, and its loss after the steps it was trained for."""

    number: int
    values: dict[str, Any]
    steps: int = 0
    loss: float = math.inf
    losses: dict[int, float] = field(default_factory=dict)
    """The loss at each rung."""

    def to_json(self) -> dict[str, Any]:
        loss = self.loss if math.isfinite(self.loss) else None
        return {"trial": self.number, "values": self.values, "steps": self.steps, "loss": loss,
                "losses": {str(k): v if math.isfinite(v) else None for k, v in self.losses.items()}}  # fmt: skip


def rungs(steps: int, trials: int, factor: int) -> list[tuple[int, int]]:
    """Steps and number of trials of each rung: each has factor times fewer trials and more steps than the last."""
    count = 1
    while trials // factor**count >= 1 and steps // factor**count >= 1:
        count += 1
    return [(max(1, steps // factor ** (count - 1 - i)), max(1, trials // factor**i)) for i in range(count)]


def successive_halving(
    sampler: Sampler, steps: int, trials: int, factor: int, run: Callable[[list[Trial], int], list[float]],
    report: Callable[[str], None] = lambda text: None, at_once: int = 1,
) -> list[Trial]:  # fmt: skip
    """All trials, the best first. `run` trains some up to a step, continuing them, and returns their losses. A sampler
    that learns from losses proposes `at_once` trials at a time."""
    found: list[Trial] = []
    for i, (until, kept) in enumerate(rungs(steps, trials, factor)):
        if i:
            found.sort(key=lambda trial: (trial.loss, trial.number))
            kept = min(kept, sum(math.isfinite(trial.loss) for trial in found))
        size = at_once if sampler.learns and i == 0 else max(1, kept)
        for first in range(0, kept, size):
            some = range(first, min(kept, first + size))
            chosen = [found[k] for k in some] if i else [_new(sampler, found) for _ in some]
            for trial, loss in zip(chosen, run(chosen, until), strict=True):
                trial.loss, trial.steps = loss, until
                trial.losses[until] = loss
                if i == 0:
                    sampler.tell(trial.values, loss)
                values = " ".join(f"{key}={value}" for key, value in trial.values.items())
                report(f"trial {trial.number} ({values}): step {until}, loss {loss:.4f}")
    found.sort(key=lambda trial: (-trial.steps, trial.loss, trial.number))
    return found


def _new(sampler: Sampler, found: list[Trial]) -> Trial:
    found.append(Trial(len(found), sampler.ask()))
    return found[-1]
