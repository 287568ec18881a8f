"""`weft trace`: a few steps of a job on its own ranks, in one trace of all ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from weft.data.loader import to_device
from weft.job.errors import Exit
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.launch.run_files import RunFiles
from weft.launch.train import prepare
from weft.measure.step_profile import clear_measurement
from weft.supervisor.local_ranks import launch
from weft.supervisor.run_lock import run_lock
from weft.training.metrics import StepMetrics
from weft.training.session import Session
from weft.training.signals import Signals
from weft.watch.journal import read_metrics
from weft.watch.traces.merge import summary_path
from weft.watch.traces.tracer import TraceRequest

WARMUP_STEPS = 8
"""Steps before the traced ones; the median of the last half is compared with the traced steps."""
SUFFIX = "-trace"


def trace_job(
    job: Job, nproc: int | None, steps: int, out: Path | None, report: Callable[[str], None]
) -> tuple[int, Path, dict[str, Any]]:
    """Trace steps of a job in a run of its own, runs/NAME-trace. Returns exit code, file and summary."""
    train = {"steps": WARMUP_STEPS + steps, "eval_every": 0}
    job = job.model_copy(update={"name": job.name + SUFFIX, "train": job.train.model_copy(update=train)})
    job, plan = prepare(job, nproc)
    run = RunDir(Path(job.runs_dir) / job.name)
    file = (out or run.path / "trace.json").absolute()
    with run_lock(run) as lock:
        files = RunFiles(run, lock.created)
        clear_measurement(run)
        files.write(job, plan)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints lines of its own
        worker = ("weft.measure.trace_steps", str(steps), str(file))
        code = abs(launch(run, plan.world, lock, report, worker=worker))
        if code:
            if code == Exit.JOB:
                files.undo()
            return code, file, {}
        summary = json.loads(summary_path(file).read_text(encoding="utf-8"))
        times = {r["step"]: r["step_time_s"] * 1e3 for r in read_metrics(run.metrics)}
        traced = [times[step] for step in summary["steps"]]
        before = sorted(times[step] for step in times if WARMUP_STEPS // 2 < step < summary["steps"][0])
        summary["measured_step_ms"] = sum(traced) / len(traced)
        summary["untraced_step_ms"] = before[len(before) // 2]
        summary_path(file).write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return code, file, summary


def traced_steps(session: Session, signals: Signals, steps: int, out: Path) -> Exit:
    """Take some steps as the loop does, trace the last ones, and write the files."""
    tracer, device = session.tracer, session.mesh.device
    tracer.request = TraceRequest(WARMUP_STEPS + 1, steps, out)
    write = session.journal.metrics if session.journal else (lambda record: None)
    metrics = StepMetrics(
        session.job, session.plan, session.mesh, session.state, write, signals, session.guards, tracer
    )
    metrics.start_clock()
    with closing(session.loader()) as loader:
        for _ in range(WARMUP_STEPS + steps):
            session.now("data")
            lr = session.stepper.learning_rate()
            batches = [to_device(b, device) for b in next(loader)]
            session.now("compute")
            grads = session.stepper.gradients(batches)
            session.now("update")
            norm, _ = session.stepper.update(grads, lr)
            metrics.post(grads, norm, lr)
            if tracer.between_steps():
                metrics.start_clock()
    metrics.settle()
    return Exit.DONE


if __name__ == "__main__":
    from weft.training.rank import exit_process, run_launched_rank

    count, path = int(sys.argv[2]), Path(sys.argv[3])
    exit_process(run_launched_rank(lambda session, signals: traced_steps(session, signals, count, path)))
