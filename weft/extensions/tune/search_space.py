"""The values that `--over` names: ranges and lists of job fields, and points in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from weft.job.errors import JobError

LOG_RATIO = 8.0
"""A range whose ends differ by at least this factor is sampled on a logarithmic scale."""
MAX_REPEATS = 100
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


@dataclass(frozen=True)
class Dimension:
    """A job field and its values: a list, or a range."""

    key: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    """Whether the range holds whole numbers."""

    @property
    def log(self) -> bool:
        return not self.values and self.low > 0 and self.high / self.low >= LOG_RATIO

    def at(self, share: float) -> Any:
        """The value at a share from 0 to 1 of the range or list."""
        if self.values:
            return self.values[min(int(share * len(self.values)), len(self.values) - 1)]
        if self.log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        return round(value) if self.whole else float(f"{value:.4g}")


def parse_space(text: str) -> tuple[Dimension, ...]:
    """Dimensions of a text such as optim.lr=1e-4..3e-3,train.global_batch=8,16."""
    given: dict[str, list[str]] = {}
    last = ""
    for part in text.split(","):
        key, sign, value = part.partition("=")
        if sign:
            last = key.strip()
            if last in given:
                raise JobError(f"--over has {last} twice; keep one of them")
            given[last] = [value.strip()]
        elif not last:
            raise JobError(f"--over {text!r} is not KEY=VALUES; write for example optim.lr=1e-4..3e-3")
        else:
            given[last].append(part.strip())
    return tuple(_dimension(key, values) for key, values in given.items())


def _dimension(key: str, values: list[str]) -> Dimension:
    if not key or any(not value for value in values):
        raise JobError(f"--over {key}={','.join(values)}: a value is empty; write for example optim.lr=1e-4..3e-3")
    if len(values) > 1 or ".." not in values[0]:
        return Dimension(key, tuple(_number(value) for value in values))
    low, high = (_number(end) for end in values[0].split("..", 1))
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)) or not low < high:
        raise JobError(f"--over {key}={values[0]} is not a range; write LOW..HIGH with LOW below HIGH")
    return Dimension(key, (), float(low), float(high), isinstance(low, int) and isinstance(high, int))


def _number(text: str) -> Any:
    try:
        value = float(text)
    except ValueError:
        try:
            return yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise JobError(f"--over: {text!r} is not a value") from None
    if not math.isfinite(value):
        raise JobError(f"--over: {text!r} is not a finite number")
    return int(text) if text.lstrip("+-").isdigit() else value


def _halton(index: int, base: int) -> float:
    found, share = 0.0, 1.0
    while index:
        share /= base
        found += share * (index % base)
        index //= base
    return found


class EvenSampler:
    """Points that fill the space evenly (Halton sequence), the same ones for a seed. A point is not repeated while
    MAX_REPEATS draws find another, so that trials of a list try all of its values."""

    learns = False

    def __init__(self, space: Sequence[Dimension], seed: int):
        self.space, self.index = space, seed + 1
        self.asked: list[dict[str, Any]] = []

    def ask(self) -> dict[str, Any]:
        found = self._draw()
        for _ in range(MAX_REPEATS):
            if found not in self.asked:
                break
            found = self._draw()
        self.asked.append(found)
        return found

    def _draw(self) -> dict[str, Any]:
        shares = [_halton(self.index, PRIMES[i % len(PRIMES)]) for i in range(len(self.space))]
        self.index += 1
        return {dimension.key: dimension.at(share) for dimension, share in zip(self.space, shares, strict=True)}

    def tell(self, values: dict[str, Any], loss: float) -> None:
        """Nothing is learned from results."""


class BayesSampler:
    """Points near the best results so far: Optuna's tree-structured Parzen estimator."""

    learns = True

    def __init__(self, space: Sequence[Dimension], seed: int):
        try:
            import optuna
        except ImportError:
            raise JobError("--sampler bayes needs Optuna: pip install weft[tune], or use --sampler even") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        start = EvenSampler(space, seed)
        self.study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=4))
        self.first = [start.ask() for _ in range(4)]
        kinds: dict[str, Any] = {}
        for d in space:
            if d.values:
                kinds[d.key] = optuna.distributions.CategoricalDistribution(d.values)
            elif d.whole:
                kinds[d.key] = optuna.distributions.IntDistribution(int(d.low), int(d.high), log=d.log)
            else:
                kinds[d.key] = optuna.distributions.FloatDistribution(d.low, d.high, log=d.log)
        self.kinds, self.asked = kinds, list[tuple[dict[str, Any], Any]]()
        self.make = optuna.trial.create_trial

    def ask(self) -> dict[str, Any]:
        if self.first:
            return self.first.pop(0)
        trial = self.study.ask(self.kinds)
        values = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in trial.params.items()}
        self.asked.append((values, trial))
        return values

    def tell(self, values: dict[str, Any], loss: float) -> None:
        finite = loss if math.isfinite(loss) else 1e9
        for asked, trial in self.asked:
            if asked == values:
                self.study.tell(trial, finite)
                self.asked.remove((asked, trial))
                return
        self.study.add_trial(self.make(params=values, distributions=self.kinds, value=finite))


SAMPLERS: dict[str, type[EvenSampler] | type[BayesSampler]] = {"even": EvenSampler, "bayes": BayesSampler}
