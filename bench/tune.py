"""`weft tune` beside a grid of full runs: the learning rate that each finds, its loss and its cost in steps.

    python bench/tune.py [--steps 243] [--trials 9] [--sampler even]

The grid has as many rates as the search has trials, evenly spaced on a logarithmic scale over the same range.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from weft.extensions.tune.successive_halving import Trial
from weft.extensions.tune.trial_runner import open_trials
from weft.extensions.tune.trial_runs import TuneOptions, run_trials, tune
from weft.job.load import load_job

LOW, HIGH = 1e-5, 1e-1


def job_file(folder: Path, steps: int) -> str:
    """A small language model on Python's documentation."""
    job: dict[str, Any] = {
        "name": "bench-tune", "runs_dir": str(folder / "runs"),
        "model": {"family": "llama", "dim": 32, "layers": 2, "heads": 4, "ffn": 64, "vocab": 256},
        "data": {"source": "pydoc", "seq_len": 64},
        "train": {"steps": steps, "global_batch": 8, "eval_every": steps // 9, "eval_batches": 8},
        "optim": {"lr": 1e-3}, "cluster": {"device": "cpu"}, "checkpoint": {"every": 10**6},
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(json.dumps(job), encoding="utf-8")
    return str(path)


def grid(name: str, folder: Path, steps: int, count: int) -> list[Trial]:
    """Full runs of evenly spaced rates."""
    rates = [LOW * (HIGH / LOW) ** (i / (count - 1)) for i in range(count)]
    trials = [Trial(i, {"optim.lr": float(f"{rate:.4g}")}) for i, rate in enumerate(rates)]
    with open_trials(load_job(name)) as runner:
        losses = run_trials(name, (), trials, steps, 1, folder, runner, print)
    for trial, loss in zip(trials, losses, strict=True):
        trial.loss, trial.steps = loss, steps
    return sorted(trials, key=lambda trial: trial.loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=243)
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--sampler", default="even")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        name = job_file(folder, args.steps)
        began = time.perf_counter()
        options = TuneOptions(f"optim.lr={LOW}..{HIGH}", args.trials, 3, args.sampler)
        found = tune(name, (), 1, options, print)
        tuned_s, began = time.perf_counter() - began, time.perf_counter()
        full = grid(name, folder / "grid", args.steps, args.trials)
        grid_s = time.perf_counter() - began
    ours, best = found.trials[0], full[0]
    print(json.dumps({
        "tune": {"lr": ours.values["optim.lr"], "loss": ours.loss, "steps": found.steps, "seconds": round(tuned_s, 1)},
        "grid": {"lr": best.values["optim.lr"], "loss": best.loss, "steps": args.steps * args.trials,
                 "seconds": round(grid_s, 1), "losses": {t.values["optim.lr"]: round(t.loss, 4) for t in full}},
        "loss_ratio": ours.loss / best.loss, "cost_ratio": found.steps / (args.steps * args.trials),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
