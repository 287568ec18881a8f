"""`weft tune`: settings found by trials."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import AsJson, JobArg, Nproc, Overrides, clean_up_on_interrupt, print_json, print_stderr


def tune(
    job: JobArg,
    overrides: Overrides = None,
    over: Annotated[
        str | None, typer.Option("--over", help="Fields and their values: optim.lr=1e-4..3e-3,train.global_batch=8,16.")
    ] = None,
    goal: Annotated[
        str, typer.Option("--for", help="loss, or speed: microbatch, recompute, compile, buckets around the plan.")
    ] = "loss",
    trials: Annotated[int, typer.Option(min=1, max=10_000, help="Number of trials.")] = 9,
    factor: Annotated[int, typer.Option(min=2, max=100, help="Each rung keeps one of so many trials.")] = 3,
    sampler: Annotated[str, typer.Option(help="even, or bayes (needs Optuna).")] = "even",
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the sampler.")] = 0,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Measured steps of --for speed.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Write the job with the best settings to this file.")] = None,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Tune a job by trials: short runs, of which the best are continued. With --for speed, by measured steps."""
    from weft.job.errors import JobError, check_output_file
    from weft.job.load import load_job
    from weft.planner.advice.pinned_job import write_job

    if out is not None:
        check_output_file(out, "--out", "best.yaml")
        if not out.absolute().parent.is_dir():
            raise JobError(f"--out {out}: there is no folder {out.parent}")
    clean_up_on_interrupt()
    if goal == "speed":
        from weft.extensions.tune.speed import find_fastest

        if over is not None:
            raise JobError("--over belongs to --for loss; --for speed chooses its fields itself")
        fastest = find_fastest(load_job(job, overrides or ()), nproc, steps, print_stderr)
        data, lines, best = fastest.to_json(), fastest.table(), fastest.job
    elif goal == "loss":
        from weft.extensions.tune.trial_runs import TuneOptions
        from weft.extensions.tune.trial_runs import tune as search

        if over is None:
            raise JobError("weft tune needs --over, such as optim.lr=1e-4..3e-3, or --for speed")
        found = search(job, overrides or (), nproc, TuneOptions(over, trials, factor, sampler, seed), print_stderr)
        data, lines, best = found.to_json(), found.table(), found.job
    else:
        raise JobError(f"--for {goal!r} is not known; use loss or speed")
    print_json(data) if as_json else print("\n".join(lines))
    if out is not None:
        print_stderr(f"written: {write_job(best, out)}")
