"""A training run with faults injected at given steps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.comm.shards import local_of
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.planner import make_plan
from weft.training.loop import fit_or_explain
from weft.training.open_session import open_session
from weft.training.rank import train_with_rollback
from weft.training.resume import roll_back
from weft.training.session import Session
from weft.training.step import Gradients
from weft.training.stop_requests import Signals

Fault = tuple[int, str, int]
"""Step, kind and rank of a fault that happens once."""


def _grads_times(session: Session, factor: float) -> None:
    for leaf in session.state.model.grad_params.values():
        local_of(leaf.grad).mul_(factor)


@torch.no_grad()
def _flip(session: Session) -> None:
    """One bit of one weight."""
    master = local_of(next(iter(session.state.model.master_params.values())))
    master.view(torch.int32).view(-1)[3] ^= 1 << 20


LOSS: dict[str, float] = {"nan": float("nan"), "poison": 50.0}
"""Factor of the loss of a batch on the affected ranks."""

AFTER: dict[str, Callable[[Session], None]] = {"flip": _flip, "odd": lambda session: _grads_times(session, math.nan)}
"""Faults after the gradients are computed."""

LATER: dict[str, Callable[[Session], None]] = {"silent": _flip}
"""Faults between an update and the check of its result."""


def train(job: Job, folder: str, faults: list[Fault], skipped: list[int]) -> tuple[int, int, str]:
    """Train to the end. Returns the exit code, the steps done, and a digest of this rank's weights."""
    job, plan = make_plan(job)
    run = RunDir(Path(folder))
    session = open_session(job, plan, run)
    session.state.skipped_steps |= set(skipped)
    left = list(faults)
    gradients, loss_of = session.stepper.gradients, session.stepper.loss_of

    def faulty_gradients(batches: list[Any]) -> Gradients:
        due = [f for f in left if f[0] == session.state.step + 1 and f[1] not in LATER]
        here = [kind for _, kind, rank in due if rank in (-1, session.mesh.rank)]
        factor = math.prod(LOSS.get(kind, 1.0) for kind in here)
        session.stepper.loss_of = lambda *given: (  # type: ignore[method-assign]
            lambda *args, **more: loss_of(*given)(*args, **more) * factor
        )
        grads = gradients(batches)
        for fault in due:
            left.remove(fault)
        for kind in here:
            AFTER.get(kind, lambda session: None)(session)
        return grads

    update = session.stepper.update

    def faulty_update(grads: Gradients, lr: float) -> Any:
        done = update(grads, lr)
        due = [f for f in left if f[0] == session.state.step and f[1] in LATER]
        for fault in due:
            left.remove(fault)
            if fault[2] in (-1, session.mesh.rank):
                LATER[fault[1]](session)
        return done

    session.stepper.gradients, session.stepper.update = faulty_gradients, faulty_update  # type: ignore[method-assign]
    signals = Signals()
    try:
        code = train_with_rollback(session, signals, fit_or_explain)
    finally:
        signals.restore()
    digest = hashlib.sha256()
    for name, master in sorted(session.state.model.master_params.items()):
        digest.update(name.encode() + local_of(master.detach()).contiguous().numpy().tobytes())
    session.mesh.barrier()
    session.close()
    return int(code), session.state.step, digest.hexdigest()


def steps_held_after_a_restart(job: Job, folder: str, step: int, back_to: int) -> list[int]:
    """Take a snapshot of a step, and go back to one before it without a snapshot. Returns the steps then held."""
    job, plan = make_plan(job)
    session = open_session(job, plan, RunDir(Path(folder)))
    session.snapshots.take(step, session.state.shards(), {})
    session.snapshots.seal(step, {})
    assert session.snapshots.held() == [step]
    roll_back(session, back_to)
    session.close()
    return session.snapshots.held()
