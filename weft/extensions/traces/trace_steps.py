"""`weft trace`: a few steps of a job on its own ranks, in one trace of all ranks."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.extensions.traces.merge import summary_path
from weft.extensions.traces.tracer import StepTracer, TraceRequest
from weft.job.errors import check_output_file
from weft.job.schema import Job
from weft.measure.short_run import short_run, take_steps
from weft.training.session import Session
from weft.watch.journal import read_metrics

WARMUP_STEPS = 8
"""Steps before the traced ones; the median of the last half is compared with the traced steps."""
SUFFIX = "-trace"


def trace_job(
    job: Job, nproc: int | None, steps: int, out: Path | None, report: Callable[[str], None]
) -> tuple[int, Path, dict[str, Any]]:
    """Trace steps of a job in a run of its own, runs/NAME-trace. Returns exit code, file and summary."""
    file = (out or Path(job.runs_dir) / (job.name + SUFFIX) / "trace.json").absolute()
    check_output_file(file, "--out", "trace.json")
    check_output_file(summary_path(file), "--out", "trace.json")
    worker = ("weft.extensions.traces.trace_steps", str(steps), str(file))
    code, run, _ = short_run(job, nproc, SUFFIX, WARMUP_STEPS + steps, report, worker)
    if code:
        return code, file, {}
    summary = json.loads(summary_path(file).read_text(encoding="utf-8"))
    times = {r["step"]: r["step_time_s"] * 1e3 for r in read_metrics(run.metrics)}
    first = summary["steps"][0]
    summary["measured_step_ms"] = statistics.mean(times[step] for step in summary["steps"])
    summary["untraced_step_ms"] = statistics.median(t for s, t in times.items() if WARMUP_STEPS // 2 < s < first)
    summary_path(file).write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return code, file, summary


def request_trace(session: Session, steps: int, out: Path) -> None:
    """Trace the steps after the warm-up."""
    request = TraceRequest(WARMUP_STEPS + 1, steps, out)
    announce = lambda: session.heartbeat.now("checkpoint", session.state.step)  # noqa: E731
    session.observers.observers = [StepTracer(session.run, session.mesh, request, announce, session.job.watch.nvtx)]


if __name__ == "__main__":
    from weft.training.rank import exit_process, run_launched_rank

    count = int(sys.argv[2])
    exit_process(
        run_launched_rank(
            lambda session, signals: take_steps(session, signals, WARMUP_STEPS + count),
            hook=lambda session: request_trace(session, count, Path(sys.argv[3])),
        )
    )
