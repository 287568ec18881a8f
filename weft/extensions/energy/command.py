"""`weft bench power`."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.common import AsJson, JobArg, Nproc, Overrides, clean_up_on_interrupt, print_json, print_stderr


def bench_power(
    job: JobArg,
    overrides: Overrides = None,
    caps: Annotated[str | None, typer.Option(help="Power caps in watts, such as 700,500,300. Default: five.")] = None,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Number of timed steps under each cap.")] = 20,
    nproc: Nproc = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed and energy of a job under power caps of its GPUs. Needs root; caps are restored."""
    from weft.job.load import load_job

    described = load_job(job, overrides or ())
    from weft.extensions.energy.power_sweep import bench_power, show

    clean_up_on_interrupt()
    result = bench_power(described, nproc, caps, steps, print_stderr)
    print_json(result) if as_json else print(show(result))
