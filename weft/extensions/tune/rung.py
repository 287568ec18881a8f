"""A rank of a trial: trains up to a step with the learning rates of the whole run, and saves a checkpoint."""

from __future__ import annotations

import sys

from weft.job.errors import Exit
from weft.training.loop import fit_or_explain
from weft.training.session import Session
from weft.training.stop_requests import Signals


def train_until(session: Session, signals: Signals, step: int) -> Exit:
    """The training loop with another last step; the stepper keeps the job's own, for the schedule."""
    train = session.job.train.model_copy(update={"steps": step})
    session.job = session.job.model_copy(update={"train": train})
    return fit_or_explain(session, signals)


if __name__ == "__main__":
    from weft.training.rank import exit_process, run_launched_rank

    exit_process(run_launched_rank(lambda session, signals: train_until(session, signals, int(sys.argv[2]))))
