"""`weft train` and `prove`."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.common import AsJson, Device, JobArg, Nproc, Overrides, clean_up_on_interrupt, on_device, print_stderr

if TYPE_CHECKING:
    from weft.supervisor.fork_server import ForkServer


def train(
    job: JobArg,
    overrides: Overrides = None,
    nproc: Nproc = None,
    fresh: Annotated[bool, typer.Option(help="Rename an earlier run of this name and start from step 0.")] = False,
    resilient: Annotated[
        bool | None, typer.Option(help="Replace lost ranks and continue. On by default.", show_default=False)
    ] = None,
) -> None:
    """Train a job. A run that is started again resumes; ranks started by torchrun or mpirun join."""
    _exit_on_signals()
    from weft.supervisor.fork_server import start_early

    early = start_early(resilient)
    try:
        raise typer.Exit(_train(job, overrides or [], nproc, fresh, resilient, early))
    finally:
        if early is not None:
            early.close()


def _train(
    job: str, overrides: list[str], nproc: int | None, fresh: bool, resilient: bool | None, early: ForkServer | None
) -> int:
    """Train as the supervisor of all ranks, as that of a node, or as one rank of a world. Returns the exit code."""
    from weft.hardware.process_age import process_age_s
    from weft.hardware.rank_environment import export_torchrun_variables
    from weft.job.load import load_job

    described = load_job(job, overrides)
    if "RANK" not in os.environ:
        print_stderr(f"{described.name}: planning, then starting the ranks")
    from weft.launch.claims import claimed_for_run
    from weft.launch.node import start_node, this_node
    from weft.launch.train import join, prepare, start
    from weft.planner.advice.auto_gain import auto_gain
    from weft.watch.live_block import over_block

    clean_up_on_interrupt()
    place = this_node(described, nproc)
    if place is None and export_torchrun_variables():
        return join(described, log=print_stderr)
    nodes = place.count if place is not None else 1

    def log(text: str) -> None:
        print_stderr(text, over_block(""))

    def log_wait(text: str) -> None:
        if early is not None:
            early.close()  # a run that waits for its turn takes no memory
        print_stderr(text)

    with claimed_for_run(described, nproc, log_wait, nodes) as (described, nproc, inherit):
        if place is not None:
            return start_node(described, place, nproc, log=log, inherit=inherit)
        prepared = prepare(described, nproc)
        if (gain := auto_gain(described, prepared[1])) is not None:
            print_stderr(f"faster: {gain}")
        began = time.time() - process_age_s()
        return start(
            *prepared, fresh=fresh, resilient=resilient, log=log, inherit=inherit, began=began,
            fork_server=None if early is None or early.closed else early,
        )  # fmt: skip


def _exit_on_signals() -> None:
    """Exit on a stop signal while there are no ranks: nothing has to be saved."""
    from weft.supervisor.stop_signals import STOP_CODES, handled_signals

    for number in handled_signals():
        signal.signal(number, lambda number, frame: os._exit(int(STOP_CODES[signal.Signals(number)])))


def prove(
    job: JobArg,
    overrides: Overrides = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            "--layouts", "-l", help="Layouts, such as ddp2,zero3,'dp_shard=2 tp=2'. Default: all that fit the job."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps to compare.")] = 3,
    shrink: Annotated[bool, typer.Option(help="Use a small model of the same kind.")] = False,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Prove that layouts train the same run. Compares each with one process, on local ranks."""
    from weft.cli.views.prove import run_and_show
    from weft.job.load import load_job

    described = load_job(job, on_device(overrides, device))
    clean_up_on_interrupt()
    raise typer.Exit(run_and_show(described, layouts or [], steps, shrink, as_json))
