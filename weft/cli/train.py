"""Verbs that train: a run, the proof that every layout is the same run, a rehearsal of its faults."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from weft.cli.common import AsJson, JobArg, Nproc, Overrides, say


def train(
    job: JobArg,
    overrides: Overrides = None,
    nproc: Nproc = None,
    fresh: Annotated[bool, typer.Option(help="Set an earlier run of this name aside and start from step 0.")] = False,
    resilient: Annotated[
        bool | None,
        typer.Option(
            help="Replace ranks that are lost and go on. Left out: with more than one rank.", show_default=False
        ),
    ] = None,
) -> None:
    """Train a job. Started again, it resumes; started by torchrun or mpirun, it joins."""
    _leave_when_asked()
    from weft.hardware.rank_environment import adopt
    from weft.job.load import load_job
    from weft.launch.node import start_node, this_node
    from weft.launch.train import join, prepare, start

    described = load_job(job, overrides or ())
    if (place := this_node(described, nproc)) is not None:
        raise typer.Exit(start_node(described, place, nproc, log=say))
    if adopt():
        raise typer.Exit(join(described, log=say))
    raise typer.Exit(start(*prepare(described, nproc), fresh=fresh, resilient=resilient, log=say))


def _leave_when_asked() -> None:
    """Exit on a stop signal while there are no ranks: nothing has to be saved."""
    from weft.supervisor.stop_signals import STOP_CODES, handled_signals

    for number in handled_signals():
        signal.signal(number, lambda number, frame: sys.exit(int(STOP_CODES[signal.Signals(number)])))


def prove(
    job: JobArg,
    overrides: Overrides = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option("--layouts", "-l", help="Such as ddp2,zero3,'dp_shard=2 tp=2'. Left out: all that fit the job."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    shrink: Annotated[bool, typer.Option(help="Prove a small model of the same kind instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Prove on local CPU ranks that every layout is the same run as one process."""
    from weft.cli.views.prove import run_and_show
    from weft.job.load import load_job

    raise typer.Exit(run_and_show(load_job(job, overrides or ()), layouts or [], steps, shrink, as_json))


def chaos(
    job: JobArg,
    overrides: Overrides = None,
    faults: Annotated[
        str, typer.Option(help="Such as kill:3,stop@1,nan (KIND[:COUNT][@RANK]), random:10, or all.")
    ] = "random:5",
    seed: Annotated[int, typer.Option(help="Another seed: other ranks, other moments.")] = 0,
    nproc: Nproc = None,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts of network namespaces (root), each with --nproc ranks.")] = 1,
    every: Annotated[
        float | None, typer.Option(min=1, help="Strike at about this many seconds' distance until the run ends.")
    ] = None,
    compare: Annotated[bool, typer.Option(help="Run undisturbed first, and compare every bit of the weights.")] = True,
    restart: Annotated[bool, typer.Option("--restart", help="Start the run again however it ended.")] = False,
    patience: Annotated[float, typer.Option(min=1, help="Seconds without a step until the run is given up.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Rehearse: put faults into a real local run, and account for what they cost. Exit code 1 if anything was lost."""
    from weft.chaos.fault_injector import Experiment
    from weft.cli.views.chaos import run_and_show
    from weft.job.load import load_job

    described = load_job(job, overrides or ())
    asked = Experiment(
        described, nproc, faults, seed, nodes, every_s=every, compare=compare, restart=restart, timeout_s=patience
    )
    raise typer.Exit(run_and_show(asked, as_json))
