"""`weft chaos`: the command."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.common import AsJson, Device, JobArg, Nproc, Overrides, clean_up_on_interrupt, on_device


def chaos(
    job: JobArg,
    overrides: Overrides = None,
    faults: Annotated[
        str, typer.Option(help="Faults: KIND[:COUNT][@RANK] such as kill:3,stop@1,nan; random:N; or all.")
    ] = "random:5",
    seed: Annotated[int, typer.Option(help="Random seed of the ranks and times of the faults.")] = 0,
    nproc: Nproc = None,
    nodes: Annotated[
        int,
        typer.Option(min=1, help="Number of simulated hosts (network namespaces; needs root) with --nproc ranks each."),
    ] = 1,
    every: Annotated[float | None, typer.Option(min=1, help="Mean seconds between faults, until the run ends.")] = None,
    compare: Annotated[bool, typer.Option(help="First run without faults, and compare the weights bit by bit.")] = True,
    restart: Annotated[bool, typer.Option("--restart", help="Start the run again after any end.")] = False,
    patience: Annotated[
        float, typer.Option(min=1, help="Seconds without a step after which the run is given up.")
    ] = 300.0,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Inject faults into a local run. Measures what they cost; exit code 1 if samples were lost."""
    from weft.extensions.chaos.fault_injector import Experiment
    from weft.extensions.chaos.view import run_and_show
    from weft.job.load import load_job

    described = load_job(job, on_device(overrides, device))
    asked = Experiment(
        described, nproc, faults, seed, nodes, every_s=every, compare=compare, restart=restart, timeout_s=patience
    )
    clean_up_on_interrupt()
    raise typer.Exit(run_and_show(asked, as_json))
