"""`weft.train(job)`: the whole flow in one call, and the same that the command line runs."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from weft.data.dataset import check_dataset
from weft.hardware.probe import probe
from weft.hardware.rank_environment import adopt
from weft.job.errors import Exit, JobError, MachineError
from weft.job.load import dump_yaml
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.planner import RUNNABLE, Plan, check, check_fits, make_plan
from weft.server.launcher import launch_server_run
from weft.server.rendezvous import prepare_rendezvous
from weft.supervisor.local_ranks import KILLED, QUIET, launch, locked
from weft.supervisor.process_manager import guard
from weft.watch.closing_lines import closing_lines
from weft.watch.report import write_report


def prepare(job: Job, nproc: int | None = None) -> tuple[Job, Plan]:
    """Plan a job and refuse, before a process starts, what cannot run."""
    job, plan = make_plan(job, nproc)
    check(job, plan, RUNNABLE)
    if plan.device == "cuda" and not probe().gpus:
        raise MachineError(
            f"the job wants {plan.device_name}, but this machine has no NVIDIA GPU; weft plan works here, and training "
            "with cluster.device=cpu"
        )
    check_fits(job, plan)
    check_dataset(job)
    return job, plan


def start(
    job: Job, plan: Plan, *, fresh: bool = False, resilient: bool | None = None, say: Callable[[str], None] = print
) -> int:
    """Train a prepared job on local ranks. Returns the exit code; the run is in runs/NAME.

    `resilient` puts a supervisor beside the ranks, which replaces those that are lost; left out, with several ranks.
    """
    run = RunDir(Path(job.runs_dir) / job.name)
    with locked(run) as lock:
        if fresh:
            _set_aside(run, say)
        before = write_description(run, job, plan)
        code = start_processes(run, job, plan, lock, resilient, say)
        if code == Exit.JOB and not before:  # only the ranks could tell; a run that never was leaves no folder
            shutil.rmtree(run.path)
        elif code == Exit.JOB:
            restore_description(before)
        if code == KILLED:
            say("ended at once, without saving; start the same command again to resume from the last checkpoint")
            return int(Exit.INTERRUPTED)
        if code in QUIET:
            close(run, say)
        return code


def start_processes(
    run: RunDir, job: Job, plan: Plan, lock: int, resilient: bool | None, say: Callable[[str], None]
) -> int:
    """The ranks of a mesh, supervised or not, or the servers and workers of a run that goes through a server."""
    if plan.sync in ("server", "federated"):
        prepare_rendezvous(run)
        return launch_server_run(run, job.train.sync.servers, plan.world, lock, say)
    if plan.world > 1 if resilient is None else resilient:
        return guard(run, plan.world, job.resilience.spares, lock, say)
    return launch(run, plan.world, lock, say)


def join(job: Job, say: Callable[[str], None] = print) -> int:
    """Train as one rank of a world that torchrun, mpirun or a scheduler started."""
    from weft.training.rank import run_rank
    from weft.training.signals import Signals

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job, plan = prepare(job, world)
    if plan.sync in ("server", "federated"):
        raise JobError(
            f"train.sync={plan.sync} starts its own processes, which come and go, and not the ranks of torchrun; "
            "start it with `weft train` alone"
        )
    run = RunDir(Path(job.runs_dir) / job.name)
    signals = Signals()
    try:
        with locked(run) if rank == 0 else nullcontext():
            before = write_description(run, job, plan) if rank == 0 else {}
            code = run_rank(run, job, plan, signals)
            if code == Exit.JOB:
                restore_description(before)
    finally:
        signals.restore()
    if (failure := run.logs / f"failure-{rank}.json").is_file() and code not in QUIET:
        cause = json.loads(failure.read_text(encoding="utf-8"))
        say(f"rank {rank} {cause['position']}: {cause['kind']}: {cause['message']}")
    elif rank == 0:
        close(run, say)
    return code


def train(job: Job, nproc: int | None = None, *, fresh: bool = False, resilient: bool | None = None) -> RunDir:
    """Train a job and return its run's folder. Joins what torchrun or mpirun started, else spawns local ranks."""
    if adopt():
        code = join(job)
    else:
        code = start(*prepare(job, nproc), fresh=fresh, resilient=resilient)
    if code != Exit.DONE:
        raise SystemExit(code)
    return RunDir(Path(job.runs_dir) / job.name)


def close(run: RunDir, say: Callable[[str], None]) -> None:
    """Draw the report and say how the run ended, predicted beside measured."""
    for line in closing_lines(run):
        say(line)
    try:
        say(f"report: {write_report(run)}")
    except Exception as error:  # a run that trained well is not failed by its picture
        say(f"the report could not be drawn ({type(error).__name__}: {error}); weft report {run.path} tries again")


def write_description(run: RunDir, job: Job, plan: Plan) -> dict[Path, bytes]:
    """job.yaml and plan.json as resolved, each written whole or not at all. Returns what they held before."""
    run.path.mkdir(parents=True, exist_ok=True)
    before = {path: path.read_bytes() for path in (run.job, run.plan) if path.exists()}
    for path, text in ((run.job, dump_yaml(job)), (run.plan, plan.dumps())):
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")  # several nodes may write the same at once
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    return before


def restore_description(before: dict[Path, bytes]) -> None:
    """After a job that the ranks refused: what the run holds was made by the job it had."""
    for path, content in before.items():
        path.write_bytes(content)


def _set_aside(run: RunDir, say: Callable[[str], None]) -> None:
    """Keep what an earlier run of this name left, under another name."""
    content = [p for p in run.path.iterdir() if p.name != ".lock"]
    if not content:
        return
    number = 1
    while (old := run.path.with_name(f"{run.path.name}.old-{number}")).exists():
        number += 1
    old.mkdir()
    for path in content:
        path.rename(old / path.name)
    say(f"the earlier run is kept in {old}")
