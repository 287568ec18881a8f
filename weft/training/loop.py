"""The training loop. It has no branch for a layout, a precision or an optimizer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from weft.data.loader import to_device
from weft.data.sample_order import Calendar
from weft.guards.out_of_memory import is_oom
from weft.job.errors import DivergedError, Exit
from weft.training.figures.pipeline_timeline import recording
from weft.training.garbage_collection import GarbageCollection
from weft.training.metrics import StepMetrics, measured_figures
from weft.training.resume import has_evaluation
from weft.training.session import Session
from weft.training.step import evaluation_text
from weft.training.stop_requests import Signals
from weft.watch.progress import Progress


def fit(session: Session, signals: Signals) -> Exit:
    """Train from the session's step to the job's last one, or until all ranks agree to stop."""
    job, state, stepper = session.job, session.state, session.stepper
    steps, device = job.train.steps, session.mesh.device
    first_step = session.first_step
    held_out = session.held_out() if job.train.eval_every else []
    calendar = Calendar.of(job, session.dataset)
    in_epochs = job.train.epochs is not None or "epoch" in (job.train.eval_every, job.checkpoint.every)
    evaluated = True  # False after an evaluation that was stopped
    session.event("start", step=state.step, layout=session.plan.layout(), world=session.plan.world,
                  attempt=session.heartbeat.attempt, cores=os.cpu_count())  # fmt: skip

    epochs = (job.train.epochs or calendar.epochs(steps)) if in_epochs else None
    with Progress(steps, state.step, job.watch.every, silent=session.mesh.rank != 0, epochs=epochs) as progress:

        def write(record: dict[str, Any]) -> None:
            record["epoch"] = round(calendar.epochs(record["step"]), 6)
            session.commit(record)
            progress.update(record)
            if record.get("skipped"):
                session.event("skipped", step=record["step"], loss_scale=record.get("loss_scale"))

        def evaluate() -> dict[str, float]:
            nonlocal evaluated
            if not held_out:
                return {}
            session.now("eval")
            state.agree()
            val = stepper.evaluate(held_out, metrics.agree_to_stop)
            evaluated = bool(val)
            if not evaluated:
                return {}
            averaged = bool(state.ema.averages)
            session.event("eval", step=state.step, **val, **({"averaged": True} if averaged else {}))
            at = calendar.name(state.step) if in_epochs else f"step {state.step}"
            progress.note(f"{at}: {evaluation_text(val, averaged)}")
            return val

        observers = session.observers
        metrics = StepMetrics(job, session.plan, session.mesh, state, write, signals, session.guards, observers,
                              session.meter)  # fmt: skip
        session.now("data")  # tells the process manager, which ends a run that has not begun
        signals.begin()
        metrics.agree_to_stop()
        missing = bool(held_out) and calendar.due(job.train.eval_every, state.step) and not has_evaluation(session)
        if missing and not metrics.stop:
            session.add_to_record(evaluate())
            metrics.agree_to_stop()
        metrics.start_clock()
        with (
            closing(session.loader()) as loader, GarbageCollection() as collector, finishing_last_step(session, metrics)
        ):  # fmt: skip
            while state.step < steps and not metrics.stop:
                session.now("data")
                lr = stepper.learning_rate()
                if (read := next(loader, None)) is None:  # a growing source has no samples for another step
                    break
                batches = [to_device(b, device) for b in read]
                session.now("compute")
                with recording(session, state.step + 1):
                    grads = stepper.gradients(batches)
                session.now("update")
                norm, _ = stepper.update(grads, lr)
                metrics.post(grads, norm, lr)
                collector.after_step(state.step)
                if calendar.due(job.train.eval_every, state.step):
                    metrics.settle(**evaluate())
                    metrics.agree_to_stop()
                    metrics.start_clock()
                if calendar.due(job.checkpoint.every, state.step):
                    metrics.settle()
                    if calendar.recurs(job.checkpoint.every, state.step):
                        session.rebalance()
                    session.save(required=state.step == steps)
                session.take_snapshot()
                if observers.between_steps():
                    metrics.start_clock()
        metrics.settle()
        if state.step < steps and state.step > first_step and not job.checkpoint.none:
            session.save_between(required=True)
        session.now("checkpoint")
        session.checkpoints.wait()
        if state.step > first_step and not job.checkpoint.none:
            session.checkpoints.require(state.step)

    stopped = metrics.stop if state.step < steps or not evaluated else None
    done = state.step - first_step
    summary = {
        "step": state.step,
        "steps_done": done,
        "seconds": time.time() - session.began,
        "loss": metrics.last.get("loss"),
        "predicted": session.plan.predicted,
        "measured": measured_figures(device, metrics.step_times),
    }
    if state.step < steps and not stopped:
        summary["data_ended"] = True
    if tiers := state.optimizers.tier_report():
        summary["tiers"] = tiers
    session.event("stop" if stopped else "done", **summary, **({"code": int(stopped)} if stopped else {}))
    return stopped or Exit.DONE


@contextmanager
def finishing_last_step(session: Session, metrics: StepMetrics) -> Iterator[None]:
    """If memory runs out on any rank, commit the last complete step first, so that it is not computed again."""
    try:
        yield
    except Exception as error:
        if session.heartbeat.may_finish_step(is_oom(error)):
            with suppress(Exception):  # such as a roll-back: then that step is not kept
                metrics.settle()
        raise


def fit_or_explain(session: Session, signals: Signals) -> Exit:
    """fit(), with divergence recorded in the run before it is raised."""
    try:
        return fit(session, signals)
    except DivergedError as error:
        session.event("diverged", step=session.state.step, why=str(error))
        raise
