"""`weft.train(job)` and the start of runs from the command line."""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from weft.checkpoint.format import entries
from weft.data.open_dataset import check_dataset, with_steps
from weft.hardware.can_train import check_can_train
from weft.hardware.probe import probe
from weft.hardware.rank_environment import export_torchrun_variables
from weft.job.errors import Exit, FitError, JobError, MachineError
from weft.job.files.run_folder import RunDir
from weft.job.files.store_path import check_access
from weft.job.import_by_name import find_object
from weft.job.schema import Job
from weft.launch.claims import claimed_for_run
from weft.launch.open_files import ensure_open_files
from weft.launch.run_files import RunFiles, keep_earlier_run
from weft.planner import RUNNABLE, Plan, check, check_fits, make_plan
from weft.planner.disk_space import check_checkpoint_space
from weft.planner.engine_constants import RANK_PROCESS_BYTES
from weft.planner.ranks import shares_devices
from weft.supervisor.failure_report import keep_lines, read_failure, record_failure
from weft.supervisor.fork_server import ForkServer
from weft.supervisor.local_ranks import CLEAN_EXITS, KILLED_BY_USER, launch
from weft.supervisor.process_manager import run_supervised
from weft.supervisor.run_lock import RunLock, run_lock
from weft.watch.closing_lines import closing_lines
from weft.watch.device_meters import restore_devices
from weft.watch.follower import check_trackers, following
from weft.watch.report import write_report


def prepare(job: Job, nproc: int | None = None) -> tuple[Job, Plan]:
    """Plan a job and refuse what cannot run, before any process starts."""
    check_can_train("training")
    job, plan = make_plan(with_steps(job), nproc)
    check(job, plan, RUNNABLE)
    if plan.device == "cuda" and not probe().gpus:
        raise MachineError(
            f"the job wants {plan.device_name}, but this machine has no NVIDIA GPU; weft plan works here, and training "
            "with cluster.device=cpu"
        )
    check_fits(job, plan)
    check_processes(plan)
    check_checkpoint_space(job, plan)
    check_dataset(job)
    check_trackers(job)
    return job, plan


def check_processes(plan: Plan) -> None:
    """Refuse more CPU ranks than this machine has memory for, whatever the model."""
    most = int(probe().memory_gib * 2**30 / RANK_PROCESS_BYTES)
    if plan.device == "cpu" and plan.world // plan.nodes > most:
        raise FitError(
            f"{plan.world // plan.nodes} ranks on this machine take {RANK_PROCESS_BYTES / 2**20:.0f} MiB each before "
            f"they hold a model, and it has {probe().memory_gib:.1f} GiB; up to {most} ranks would work"
        )


def start(
    job: Job,
    plan: Plan,
    *,
    fresh: bool = False,
    resilient: bool | None = None,
    log: Callable[[str], None] = print,
    inherit: tuple[int, ...] = (),
    began: float | None = None,
    fork_server: ForkServer | None = None,
) -> int:
    """Train a prepared job on local ranks. Returns the exit code; the run is in runs/NAME.

    `resilient` (the default) starts a supervisor that replaces lost ranks. `inherit`: open files for all processes.
    `began`: when the command began, by default now (time.time). `fork_server`: one that was started before.
    """
    began = began or time.time()
    run = RunDir(Path(job.runs_dir) / job.name)
    ensure_open_files(plan.world)
    check_store(job, run, fresh=fresh)
    if plan.device == "cuda" and shares_devices(job, probe(), plan.world):
        log(f"{plan.world} ranks share {len(probe().gpus)} GPU over {plan.backend}: for testing, not for speed")
    with run_lock(run, inherit=inherit) as lock:
        if fresh:
            keep_earlier_run(run, log)
        files = RunFiles(run, lock.created)
        files.write(job, plan)
        lines: list[str] = []
        with following(run, job, log):
            try:
                code = start_processes(run, job, plan, lock, resilient, keep_lines(log, lines), began, fork_server)
            finally:
                restore_devices(run)
            record_failure(run, code, lines)
            if code in CLEAN_EXITS:
                finish(run, log)
        if code == Exit.JOB:  # only the ranks could find the mistake
            files.undo()
        if code == KILLED_BY_USER:
            log("stopped without saving; start the same command again to resume from the last checkpoint")
            return int(Exit.INTERRUPTED)
        return code


def check_store(job: Job, run: RunDir, *, fresh: bool = False) -> None:
    """Refuse a checkpoint.to that this machine cannot write to, and --fresh where it already holds checkpoints."""
    if (to := job.checkpoint.to) is None:
        return
    check_access(run.shared(to), "checkpoint.to")
    if fresh and entries(folder := run.checkpoints_in(to)):
        raise JobError(f"--fresh does not rename checkpoints in {folder}; give the run another name=, or delete them")


def start_processes(
    run: RunDir, job: Job, plan: Plan, lock: RunLock, resilient: bool | None, log: Callable[[str], None],
    began: float, fork_server: ForkServer | None,
) -> int:  # fmt: skip
    """Start the ranks of a mesh, supervised or not, or the processes of a synchronisation that has its own."""
    if start_mode := job.train.sync.entry.start:
        return int(find_object(start_mode, "train.sync")(run, job, plan, lock, log))
    if resilient is not False:
        return run_supervised(run, job, plan, plan.world, lock, log, began=began, fork_server=fork_server)
    return launch(run, plan.world, lock, log)


def join(job: Job, log: Callable[[str], None] = print) -> int:
    """Train as one rank of a world started by torchrun, mpirun or a scheduler."""
    from weft.training.rank import run_rank
    from weft.training.stop_requests import Signals

    atexit.register(gc.unfreeze)  # Triton's bindings print hundreds of lines about objects that are never collected
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job, plan = prepare(job, world)
    if job.train.sync.entry.starts_processes:
        raise JobError(
            f"train.sync={plan.sync} starts its own processes and cannot use those of torchrun; "
            "start it with `weft train` alone"
        )
    run = RunDir(Path(job.runs_dir) / job.name)
    if rank == 0:
        check_store(job, run)
    signals = Signals()
    try:
        with run_lock(run) if rank == 0 else nullcontext():
            files = RunFiles(run, created=False)  # other ranks may still write to the folder
            if rank == 0:
                files.write(job, plan)
            with following(run, job, log) if rank == 0 else nullcontext():
                code = run_rank(run, job, plan, signals)
                cause = read_failure(run.logs / f"failure-{rank}.json") if code not in CLEAN_EXITS else None
                failed = f"rank {rank} {cause['position']}: {cause['kind']}: {cause['message']}" if cause else ""
                if rank == 0:
                    record_failure(run, code, [failed] if failed else [])
            if code == Exit.JOB:
                files.undo()
    finally:
        signals.restore()
    if failed:
        log(failed)
    elif rank == 0:
        finish(run, log)
    return code


def train(job: Job, nproc: int | None = None, *, fresh: bool = False, resilient: bool | None = None) -> RunDir:
    """Train a job and return its run folder. Joins a world started by torchrun or mpirun, else starts local ranks."""
    if export_torchrun_variables():
        code = join(job)
    else:
        with claimed_for_run(job, nproc, print) as (job, nproc, inherit):
            code = start(*prepare(job, nproc), fresh=fresh, resilient=resilient, inherit=inherit)
    if code != Exit.DONE:
        raise SystemExit(code)
    return RunDir(Path(job.runs_dir) / job.name)


def finish(run: RunDir, log: Callable[[str], None]) -> None:
    """Write the report and print how the run ended, predicted beside measured."""
    try:
        for line in closing_lines(run):
            log(line)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log(f"{run.events} or {run.metrics} is damaged ({type(error).__name__}: {error}): no closing figures")
    try:
        log(f"report: {write_report(run)}")
    except Exception as error:  # a good run does not fail because of its report
        log(f"the report could not be drawn ({type(error).__name__}: {error}); weft report {run.path} tries again")
