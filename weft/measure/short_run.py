"""A few steps of a job on its own ranks, in a run of its own that writes metrics and no checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from weft.data.loader import to_device
from weft.job.errors import Exit, JobError
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.launch.run_files import RunFiles, check_is_run
from weft.launch.train import prepare
from weft.planner.plan import Plan
from weft.supervisor.local_ranks import launch
from weft.supervisor.run_lock import run_lock
from weft.training.metrics import StepMetrics
from weft.training.session import Session
from weft.training.stop_requests import Signals
from weft.watch.device_meters import restore_devices


def short_run(
    job: Job, nproc: int | None, suffix: str, steps: int, report: Callable[[str], None],
    worker: tuple[str, ...] | None = None, threads: int = 0,
) -> tuple[int, RunDir, Plan]:  # fmt: skip
    """Take `steps` steps in runs/NAME + suffix. Returns exit code, run and plan. `threads`: of each CPU rank."""
    train = {"steps": max(job.train.steps, steps), "epochs": None, "eval_every": 0}
    changes = {"name": job.name + suffix, "train": job.train.model_copy(update=train)}
    job = job.model_copy(update=changes | {"checkpoint": job.checkpoint.local})
    job, plan = prepare(job, nproc)
    run = RunDir(Path(job.runs_dir) / job.name)
    with run_lock(run) as lock:
        files = RunFiles(run, lock.created)
        clear_measurement(run)
        files.write(job, plan)
        command = worker or ("weft.measure.short_run", str(steps), str(threads))
        try:
            code = abs(launch(run, plan.world, lock, report, worker=command))
        finally:
            restore_devices(run)
        if code == Exit.JOB:
            files.undo()
    return code, run, plan


def clear_measurement(run: RunDir) -> None:
    """Delete the files of the last measurement; a run with checkpoints is refused."""
    if run.checkpoints.exists():
        raise JobError(f"{run.path} holds a training with checkpoints, not a measurement; give the job another name=")
    check_is_run(run)
    if run.job.exists():  # else they are not of a measurement
        for path in (run.metrics, run.events, run.profile, run.slices, run.report):
            path.unlink(missing_ok=True)


def take_steps(session: Session, signals: Signals, count: int) -> Exit:
    """Take steps as the training loop does, without evaluations and checkpoints."""
    observers, device = session.observers, session.mesh.device
    write = session.journal.metrics if session.journal else (lambda record: None)
    metrics = StepMetrics(
        session.job,
        session.plan,
        session.mesh,
        session.state,
        write,
        signals,
        session.guards,
        observers,
        session.meter,
    )
    metrics.start_clock()
    with closing(session.loader()) as loader:
        for _ in range(count):
            session.now("data")
            lr = session.stepper.learning_rate()
            batches = [to_device(b, device) for b in next(loader)]
            session.now("compute")
            grads = session.stepper.gradients(batches)
            session.now("update")
            norm, _ = session.stepper.update(grads, lr)
            metrics.post(grads, norm, lr)
            if observers.between_steps():
                metrics.start_clock()
    metrics.settle()
    session.event("done", step=session.state.step, steps_done=count, seconds=time.time() - session.began)
    return Exit.DONE


if __name__ == "__main__":
    from weft.training.rank import exit_process, run_launched_rank

    def work(session: Session, signals: Signals) -> Exit:
        if threads := int(sys.argv[3]):
            torch.set_num_threads(threads)
        return take_steps(session, signals, int(sys.argv[2]))

    exit_process(run_launched_rank(work))
