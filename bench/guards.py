"""The cost of the guards of a run: the time spent in them, as a share of a step.

    python bench/guards.py [JOB] [key=value …]

One process trains a recipe (demo) for 60 steps and every call into weft/guards/guards.py is timed. The last line is
the median share of a step.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.planner import make_plan
from weft.training.loop import fit
from weft.training.open_session import open_session
from weft.training.stop_requests import Signals
from weft.watch.journal import read_metrics

STEPS = 60


def main() -> None:
    name, *overrides = sys.argv[1:] or ["demo"]
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"train.steps={STEPS}", "train.eval_every=0", "checkpoint.every=0", f"runs_dir={folder}"]
        job, plan = make_plan(load_job(name, [*settings, *overrides]), 1)
        run = RunDir(Path(folder) / job.name)
        session = open_session(job, plan, run)
        spent: list[float] = []
        timed(session.guards.weights, "before_update", spent, first=True)
        session.stepper.before_update = session.guards.weights.before_update
        timed(session.guards, "tell", spent)
        timed(session.guards, "check", spent)
        signals = Signals()
        fit(session, signals)
        signals.restore()
        steps = [r["step_time_s"] for r in read_metrics(run.metrics)]
    half = STEPS // 2
    guard, step = statistics.median(spent[half:]), statistics.median(steps[half:])
    print(f"{job.name}: guards {1e6 * guard:.0f} us of a step of {1e3 * step:.1f} ms: {guard / step:.3%}")


def timed(owner: Any, name: str, spent: list[float], first: bool = False) -> None:
    """Add the time of every call to the step that it belongs to."""
    call: Callable[..., Any] = getattr(owner, name)

    def measured(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            if first:
                spent.append(0.0)
            spent[-1] += time.perf_counter() - began

    setattr(owner, name, measured)


if __name__ == "__main__":
    main()
