"""`weft bench`: measurements on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import AsJson, JobArg, Nproc, Overrides, say


def bench_step(
    job: JobArg,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to profile.")] = 3,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Show where one step's time goes, by class of kernel, and how far each is from what the device can do."""
    from weft.job.load import load_job

    described = load_job(job, overrides or ())
    from weft.measure.step_profile import bench_step, show

    code, run = bench_step(described, nproc, steps, say)
    if code:
        raise typer.Exit(code)
    print(run.profile.read_text(encoding="utf-8") if as_json else show(run))
    if not as_json:
        say(f"profile: {run.profile}; picture: {run.report}")


def bench_collectives(
    nproc: Nproc = None,
    kinds: Annotated[str | None, typer.Option(help="Such as all_reduce,broadcast. Left out: every collective.")] = None,
    algorithms: Annotated[str | None, typer.Option(help="Such as native,ring. Left out: every algorithm.")] = None,
    dtypes: Annotated[str, typer.Option(help="Such as fp32,bf16,fp16,int64.")] = "fp32,bf16",
    smallest: Annotated[str, typer.Option("--min", help="The smallest size.")] = "1K",
    largest: Annotated[str, typer.Option("--max", help="The largest size.")] = "4M",
    device: Annotated[str, typer.Option(help="cpu or cuda. auto: GPUs where there are several.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="About how long to measure.")] = 15.0,
    layout: Annotated[
        str | None, typer.Option(help="A mesh, such as 'dp_shard 2 x tp 2'; each axis is measured.")
    ] = None,
    axes: Annotated[str | None, typer.Option(help="Of the mesh, such as tp,everyone. Left out: all.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Draw it as one offline page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure every collective, on local ranks or those that torchrun or mpirun started: α, β and bandwidth."""
    from weft.measure.collectives import run_and_show

    run_and_show(nproc, kinds, algorithms, dtypes, smallest, largest, device, seconds, html, as_json, layout, axes)
