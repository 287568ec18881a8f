"""`weft eval`: loss and metrics of a run's newest checkpoint on data, in any layout."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.reader import Index
from weft.job.errors import Exit, JobError, WeftError
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.job.schema import Job
from weft.launch.run_files import RunFiles
from weft.launch.train import prepare
from weft.supervisor.failure_report import keep_lines
from weft.supervisor.local_ranks import launch
from weft.supervisor.run_lock import run_lock
from weft.training.export import newest, saved_job, without_average
from weft.training.session import Session
from weft.training.stop_requests import Signals
from weft.watch.journal import read_jsonl

EVERY_BATCH = 10**9
"""Value of train.eval_batches with which all held-out samples are evaluated."""


def evaluate_run(
    run: RunDir, overrides: Sequence[str], nproc: int | None, ema: bool, trust_module: bool,
    report: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """The figures of a run on the held-out samples of the data that the overrides name, by default the run's.

    Raises the error of the ranks as a WeftError. Nothing is written to the run's folder.
    """
    own, found = load_job(str(run.job), overrides), newest(run)
    job = own.model_copy(update={"model": saved_job(found, own, trust_module).model})
    if ema and not any(name.startswith("ema.") for name in Index(found.path).tensors):
        raise without_average(found)
    with tempfile.TemporaryDirectory(prefix="weft-eval-") as folder:
        job, plan = prepare(_evaluated(job, Path(folder), overrides), nproc)
        measured = RunDir(Path(folder) / job.name)
        lines: list[str] = []
        with run_lock(measured) as lock:
            RunFiles(measured, lock.created).write(job, plan)
            worker = ("weft.measure.evaluation", str(found.path), str(int(ema)))
            code = abs(launch(measured, plan.world, lock, keep_lines(report, lines), worker=worker))
        figures = next((e for e in reversed(read_jsonl(measured.events)) if e.get("event") == "eval"), None)
    if code or figures is None:
        raise EvaluationFailed(code)
    values = {key: value for key, value in figures.items() if key.startswith("val_")}
    return {"run": str(run.path), "step": found.step, "source": str(job.data.source), "layout": plan.layout(), **values,
            "batches": figures["batches"], "averaged": ema}  # fmt: skip


class EvaluationFailed(WeftError):
    """The ranks have said why."""

    def __init__(self, code: int):
        super().__init__("the evaluation ended without figures; the reason is above")
        self.exit_code = Exit(code) if code in list(Exit) else Exit.DIFFERS


def _evaluated(job: Job, folder: Path, overrides: Sequence[str]) -> Job:
    """The job of an evaluation: no averages, checkpoints or memory tiers, and all batches unless they are limited."""
    limited = any(text.startswith("train.eval_batches=") for text in overrides)
    batches = job.train.eval_batches if limited else EVERY_BATCH
    train = {"eval_every": 1, "eval_batches": batches, "ema": 0.0, "epochs": None}
    changes = {
        "name": "eval", "runs_dir": str(folder), "checkpoint": job.checkpoint.local,
        "train": job.train.model_copy(update=train), "memory": job.memory.model_copy(update={"offload": "none"}),
    }  # fmt: skip
    return job.model_copy(update=changes)


def evaluate(session: Session, checkpoint: Path, ema: bool) -> Exit:
    """Read the weights on each rank of a layout, and record the figures."""
    model = session.state.model
    held_out = session.held_out()
    if not held_out:
        raise JobError(
            f"data.source={session.job.data.source} has no held-out samples; data.val_fraction=0.99 would hold out "
            "nearly all of them"
        )
    index = Index(checkpoint)
    named = {f"model.{name}": t for name, t in (model.master_params | model.frozen).items()}
    if ema:
        averages = {name: f"ema.{name.removeprefix('model.')}" for name in named}
        named = {averages[n] if averages[n] in index.tensors else n: t for n, t in named.items()}
    saved = named | {f"buffer.{name}": t for name, t in model.buffers().items()}
    if text := index.mismatch(saved):
        raise JobError(text)
    with torch.no_grad():
        index.fill(saved)
    model.refresh()
    session.now("eval")
    figures = session.stepper.evaluate(held_out)
    session.event("eval", step=0, batches=len(held_out), **figures)
    return Exit.DONE


if __name__ == "__main__":
    from weft.training.rank import exit_process, run_launched_rank

    def work(session: Session, signals: Signals) -> Exit:
        return evaluate(session, Path(sys.argv[2]), sys.argv[3] == "1")

    exit_process(run_launched_rank(work))
