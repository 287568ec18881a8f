"""Trials as runs: each is a folder runs/NAME-tune/trial-N, which continues from its checkpoint when it is promoted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.open_dataset import with_steps
from weft.extensions.tune.search_space import SAMPLERS, Dimension, parse_space
from weft.extensions.tune.successive_halving import Trial, rungs, successive_halving
from weft.extensions.tune.trial_plot import draw_trials
from weft.extensions.tune.trial_runner import TrialRunner, open_trials, ranks_of_trial
from weft.job.errors import Exit, JobError, WeftError
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.job.schema import Job
from weft.planner.advice.pinned_job import write_job
from weft.watch.journal import read_jsonl

BEST = "-best"
"""Suffix of the name of the job that is written: a run of the tuned job may have finished."""
SMOOTHED = 5
"""Training losses that are averaged where a run has no validation."""


@dataclass(frozen=True)
class TuneOptions:
    """The arguments of `weft tune`."""

    over: str
    trials: int = 9
    factor: int = 3
    sampler: str = "even"
    seed: int = 0


@dataclass(frozen=True)
class Tuned:
    """The result of a search."""

    trials: list[Trial]
    folder: Path
    job: Job
    """The job with the values of the best trial."""
    grid_steps: int
    """Steps that as many trials of full length would have taken."""

    @property
    def steps(self) -> int:
        return sum(trial.steps for trial in self.trials)

    def to_json(self) -> dict[str, Any]:
        best = self.trials[0]
        return {"best": best.to_json(), "trials": [t.to_json() for t in self.trials], "steps": self.steps,
                "full_steps": self.grid_steps, "folder": str(self.folder), "job": str(self.folder / "best.yaml"),
                "plot": str(self.folder / "trials.svg")}  # fmt: skip

    def table(self) -> list[str]:
        """The trials, the best first."""
        keys = list(self.trials[0].values)
        rows = [["trial", *keys, "steps", "loss"]]
        for t in self.trials:
            rows.append([str(t.number), *(str(t.values[k]) for k in keys), str(t.steps), f"{t.loss:.4f}"])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
        best = " ".join(f"{key}={value}" for key, value in self.trials[0].values.items())
        return [*lines, f"best: {best}; {self.steps} steps instead of {self.grid_steps}"]


def tune(
    name: str, overrides: Sequence[str], nproc: int | None, options: TuneOptions, report: Callable[[str], None]
) -> Tuned:
    """Search the values of --over with the lowest loss. A search that is started again continues its trials."""
    space = parse_space(options.over)
    if options.sampler not in SAMPLERS:
        raise JobError(f"--sampler {options.sampler!r} is not known; use {' or '.join(SAMPLERS)}")
    job = load_job(name, overrides)
    _check(name, overrides, space)
    folder = Path(job.runs_dir) / f"{job.name}-tune"
    sampler = SAMPLERS[options.sampler](space, options.seed)
    steps = with_steps(job).train.steps
    plan = ", ".join(f"{n} × {until} steps" for until, n in rungs(steps, options.trials, options.factor))
    report(f"{options.trials} trials: {plan}")

    with open_trials(job) as runner:
        nproc = ranks_of_trial(job, nproc)
        together = min(options.trials, runner.at_once(job, nproc))
        if together > 1:
            report(f"up to {together} trials at a time{f', {nproc} ranks each' if nproc else ''}")

        def run(trials: list[Trial], until: int) -> list[float]:
            return run_trials(name, overrides, trials, until, nproc, folder, runner, report)

        trials = successive_halving(sampler, steps, options.trials, options.factor, run, report, together)
    if not math.isfinite(trials[0].loss):
        raise JobError(f"no trial reached a finite loss; narrow the range of --over {options.over}")
    best = load_job(name, [*overrides, *_settings(trials[0].values), f"name={job.name}{BEST}"])
    found = Tuned(trials, folder, best, steps * options.trials)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trials.json").write_text(json.dumps(found.to_json(), indent=2), encoding="utf-8")
    (folder / "trials.svg").write_text(draw_trials(trials, space), encoding="utf-8")
    write_job(best, folder / "best.yaml")
    return found


def _check(name: str, overrides: Sequence[str], space: tuple[Dimension, ...]) -> None:
    """Refuse fields and values that a job cannot have, before the first trial."""
    for dimension in space:
        for value in dimension.values or (dimension.at(0.0), dimension.at(1.0)):
            load_job(name, [*overrides, *_settings({dimension.key: value})])


def _settings(values: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def run_trials(
    name: str, overrides: Sequence[str], trials: Sequence[Trial], until: int, nproc: int | None, folder: Path,
    runner: TrialRunner, report: Callable[[str], None],
) -> list[float]:  # fmt: skip
    """Train trials up to a step, from their checkpoints if they have some. Returns their losses; infinite of those that
    diverged."""
    jobs = []
    for trial in trials:
        job = load_job(name, [*overrides, *_settings(trial.values)])
        changes = {"name": f"trial-{trial.number}", "runs_dir": str(folder), "checkpoint": job.checkpoint.local}
        jobs.append(job.model_copy(update=changes))
    runs = [RunDir(folder / job.name) for job in jobs]
    left = [i for i, run in enumerate(runs) if loss_at(run, until) is None]
    codes = runner.run([jobs[i] for i in left], nproc, ("weft.extensions.tune.rung", str(until)), report)
    for i, code in zip(left, map(abs, codes), strict=True):
        if code not in (Exit.DONE, Exit.DIVERGED):
            raise _failed(code, runs[i])
    diverged = {i for i, code in zip(left, codes, strict=True) if abs(code) == Exit.DIVERGED}
    losses = [None if i in diverged else loss_at(run, until) for i, run in enumerate(runs)]
    return [math.inf if loss is None else loss for loss in losses]


def _failed(code: int, run: RunDir) -> WeftError:
    error = WeftError(f"a trial ended with exit code {code}; see {run.logs}")
    error.exit_code = Exit(code) if code in set(Exit) else Exit.DIFFERS
    return error


def loss_at(run: RunDir, step: int) -> float | None:
    """Validation loss at a step, or the mean of the last training losses; None if the run is not so far."""
    records = {r["step"]: r for r in read_jsonl(run.metrics)} if run.metrics.exists() else {}
    if step not in records:
        return None
    if (validated := records[step].get("val_loss")) is not None:
        return float(validated)
    last = [records[s]["loss"] for s in range(max(1, step - SMOOTHED + 1), step + 1) if s in records]
    usable = [value for value in last if value is not None]
    return sum(usable) / len(usable) if usable else math.inf
