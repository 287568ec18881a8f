"""`weft launch`, `runs`, `attach`, `logs` and `stop`: runs on any target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import (
    AsJson,
    JobArg,
    Overrides,
    RunArg,
    clean_up_on_interrupt,
    print_json,
    print_stderr,
    printable,
)

RunsDir = Annotated[str, typer.Option("--runs-dir", help="Folder of all runs.")]


def launch(
    job: JobArg,
    overrides: Overrides = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="TARGET",
            help="local, slurm, kubernetes …, or a cluster of ~/.config/weft/clusters.yaml. Default: cluster.target.",
        ),
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print what would be submitted, and do nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Let the target check it; submit nothing.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is submitted.")] = False,
) -> None:
    """Start a job on a target and follow it. Plans for the target first; returns the run's exit code."""
    from weft.launch.launch_job import follow, plan_for, submit

    target, request = plan_for(job, overrides or (), on, attached=not detach)
    if print_only:
        print(target.build(request).text())
        return
    if dry_run:
        for line in target.check(request, target.build(request)):
            print_stderr(line)
        nodes = f"{request.nodes} node{'s' * (request.nodes > 1)}"
        print_stderr(f"{target.name} would accept {request.job.name}: {request.plan.layout()}, {nodes}")
        return
    if request.job.launch.when:
        from weft.launch.policy import run_by_policy, start_in_background

        if not detach:
            raise typer.Exit(run_by_policy(target, request, print_stderr))
        log = start_in_background(request, [job, *(overrides or ()), *(["--on", on] if on else [])])
        print_stderr(f"{request.job.name} runs when its rule holds; see {log}, weft stop {request.job.name} ends it")
        return
    clean_up_on_interrupt()
    record = submit(target, request)
    print_stderr(f"{request.job.name} is {target.name} job {record.job_id}: {request.plan.layout()}")
    if detach:
        print_stderr(f"weft attach {request.job.name} follows it, weft stop {request.job.name} ends it")
        return
    raise typer.Exit(follow(record, print_stderr))


def runs(runs_dir: RunsDir = "runs", as_json: AsJson = False) -> None:
    """List runs with state, target, job id and last step."""
    from weft.launch.run_list import list_runs, show_runs

    rows = list_runs(Path(runs_dir))
    if as_json:
        print_json({"runs": rows})
    else:
        print(show_runs(rows, runs_dir))


def attach(run: RunArg, runs_dir: RunsDir = "runs") -> None:
    """Follow a launched run from here on. Returns its exit code; Ctrl-C leaves the run alone."""
    from weft.launch.launch_job import attach, find_launch

    clean_up_on_interrupt()
    raise typer.Exit(attach(find_launch(run, runs_dir), print_stderr))


def logs(
    run: RunArg,
    rank: Annotated[int | None, typer.Option(min=0, help="The log file of this rank instead.")] = None,
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Print the output of a launched run, or the log of a rank."""
    from weft.launch.run_list import read_logs

    found = read_logs(run, rank, runs_dir)
    if as_json:
        print_json({"run": run, "rank": rank, "text": b"".join(found).decode(errors="replace")})
        return
    for data in found:
        sys.stdout.write(printable(data.decode(errors="replace"), keep="\n\r\t"))


def stop(
    run: RunArg,
    kill: Annotated[bool, typer.Option("--kill", help="End it without saving.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for its end.")] = 120.0,
    runs_dir: RunsDir = "runs",
) -> None:
    """Stop a launched run. It saves first; the same launch resumes it."""
    from weft.launch.launch_job import find_launch
    from weft.launch.launch_job import stop as stop_run
    from weft.launch.policy import stop_policy

    if not kill and stop_policy(run, runs_dir, timeout):
        print_stderr(f"{run} has stopped")
        return
    raise typer.Exit(stop_run(find_launch(run, runs_dir), print_stderr, kill, timeout))
