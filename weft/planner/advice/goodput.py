"""Goodput: how much of a run's time is progress, with failures, restarts and checkpoints.

Failures come at random with a mean time between them of M. Checkpoints cost C each and are taken every τ seconds of
work; a failure loses what was done since the last one and costs a restart R. The expected time of τ seconds of work is
(M + R)(e^((τ + C)/M) − 1) (Daly 2006, equation 13, with the restart counted once a failure); Young's √(2CM) is where
the search for the best τ begins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.job.schema import Failures

STATE_BYTES = 12
"""Checkpoint bytes per parameter: the fp32 weight and AdamW's two moments."""
MIN_GOODPUT = 1e-9
"""Goodput of a run that makes no progress, above 0 so that times stay finite."""
HOST_COPY_GB_S = 20.0
"""Bandwidth from a device to host memory: the part of a background checkpoint that training waits for."""


@dataclass(frozen=True)
class Goodput:
    """Goodput of a run and its checkpoint interval."""

    share: float
    """Share of the time that is progress."""
    hours_between_stops: float
    interval_s: float
    """Seconds of work between checkpoints."""
    every: int
    """The same in steps: checkpoint.every."""
    checkpoint_s: float
    """Time that training is blocked by a checkpoint."""
    write_s: float
    """Time until a checkpoint is on disk."""
    restart_s: float

    def to_json(self) -> dict[str, float]:
        return {
            "share": self.share, "hours_between_stops": self.hours_between_stops, "interval_s": self.interval_s,
            "checkpoint_every": self.every, "checkpoint_s": self.checkpoint_s, "write_s": self.write_s,
            "restart_s": self.restart_s,
        }  # fmt: skip


def expected(work: float, checkpoint: float, mean: float, restart: float) -> float:
    """Expected time of `work` seconds and a checkpoint; infinite if a failure always comes first."""
    ratio = (work + checkpoint) / mean
    return math.inf if ratio > 500 else (mean + restart) * math.expm1(ratio)


def best_interval(checkpoint: float, mean: float, restart: float, least: float = 0.0) -> float:
    """The work between checkpoints that maximises goodput."""
    if checkpoint <= 0:
        return max(least, 1e-3 * mean)
    young = math.sqrt(2 * checkpoint * mean)
    low, high = max(least, 1e-3 * young), max(least, 4 * young) * 1.001
    golden = (math.sqrt(5) - 1) / 2

    def loss(work: float) -> float:
        return expected(work, checkpoint, mean, restart) / work

    while high - low > 1e-4 * high:  # the loss falls and then rises
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if loss(a) <= loss(b) else (a, high)
    return (low + high) / 2


def goodput(
    failures: Failures, world: int, nodes: int, parameters: float, step_time_s: float, background: bool = True
) -> Goodput:
    """The best checkpoint interval of a run, and its goodput."""
    per_second = world / (failures.device_hours * 3600) + nodes * failures.preemptions_per_day / 86_400
    mean = 1 / per_second
    write = parameters * STATE_BYTES / (nodes * failures.checkpoint_gb_s * 1e9)
    blocked = min(write, parameters * STATE_BYTES / world / (HOST_COPY_GB_S * 1e9)) if background else write
    restart = failures.restart_s + write  # reading is taken to be as fast as writing
    # the next checkpoint begins when the last one is on disk
    work = best_interval(blocked, mean, restart, least=max(step_time_s, write))
    every = max(1, round(work / step_time_s))
    work = every * step_time_s
    share = max(MIN_GOODPUT, work / expected(work, blocked, mean, restart))
    return Goodput(share, mean / 3600, work, every, blocked, write, restart)
