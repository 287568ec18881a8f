"""Successive halving (Jamieson and Talwalkar 2016): short trials, of which the best are continued."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Sampler(Protocol):
    """Proposes values of a trial, and learns from losses."""

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
    sampler: Sampler, steps: int, trials: int, factor: int, run: Callable[[Trial, int], float],
    report: Callable[[str], None] = lambda text: None,
) -> list[Trial]:  # fmt: skip
    """All trials, the best first. `run` trains a trial up to a step, continuing it, and returns its loss."""
    found: list[Trial] = []
    for i, (until, kept) in enumerate(rungs(steps, trials, factor)):
        if i == 0:
            taking = range(kept)
        else:
            found.sort(key=lambda trial: (trial.loss, trial.number))
            taking = range(min(kept, sum(math.isfinite(trial.loss) for trial in found)))
        chosen = [] if i == 0 else [found[k] for k in taking]
        for k in taking:
            trial = chosen[k] if i else _new(sampler, found)
            trial.loss = run(trial, until)
            trial.steps = until
            trial.losses[until] = trial.loss
            if i == 0:
                sampler.tell(trial.values, trial.loss)
            values = " ".join(f"{key}={value}" for key, value in trial.values.items())
            report(f"trial {trial.number} ({values}): step {until}, loss {trial.loss:.4f}")
    found.sort(key=lambda trial: (-trial.steps, trial.loss, trial.number))
    return found


def _new(sampler: Sampler, found: list[Trial]) -> Trial:
    found.append(Trial(len(found), sampler.ask()))
    return found[-1]
