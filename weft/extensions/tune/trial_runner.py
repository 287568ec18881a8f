"""Where trials run: several at once where a claim kind shares the machine, else one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from weft.hardware.probe import probe
from weft.job.errors import Exit, FitError, JobError, WeftError
from weft.job.files.run_folder import RunDir
from weft.job.import_by_name import find_object
from weft.job.schema import Job
from weft.launch.claims import CLAIMS
from weft.launch.run_files import RunFiles
from weft.launch.train import prepare
from weft.planner import make_plan
from weft.planner.ranks import device_for, device_memory
from weft.supervisor.local_ranks import KILLED_BY_USER, launch
from weft.supervisor.run_lock import run_lock


class TrialRunner(Protocol):
    """Runs the ranks of trials on this machine."""

    def at_once(self, job: Job, nproc: int | None) -> int:
        """Trials that run at the same time."""

    def run(
        self, jobs: Sequence[Job], nproc: int | None, worker: tuple[str, ...], report: Callable[[str], None]
    ) -> list[int]:
        """Run the jobs in their folders. Returns their exit codes."""


@contextmanager
def open_trials(job: Job) -> Iterator[TrialRunner]:
    """The runner of the trials of a job."""
    kind = next(iter(CLAIMS), None)
    if kind is None:
        yield SerialTrials()
        return
    with find_object(kind.trials, "claim")(job) as runner:
        yield runner


class SerialTrials:
    """Runs one trial after the other."""

    def at_once(self, job: Job, nproc: int | None) -> int:
        return 1

    def run(
        self, jobs: Sequence[Job], nproc: int | None, worker: tuple[str, ...], report: Callable[[str], None]
    ) -> list[int]:
        codes = []
        for described in jobs:
            job, plan = prepare(described, nproc)
            run = RunDir(Path(job.runs_dir) / job.name)
            with run_lock(run) as lock:
                RunFiles(run, lock.created).write(job, plan)
                codes.append(launch(run, plan.world, lock, _discard, worker))
            if codes[-1] in (Exit.PREEMPTED, Exit.INTERRUPTED, KILLED_BY_USER):
                stopped = WeftError("the search was stopped; the same command continues it")
                stopped.exit_code = Exit.PREEMPTED if codes[-1] == Exit.PREEMPTED else Exit.INTERRUPTED
                raise stopped
        return codes


def _discard(text: str) -> None:
    """Why a trial failed is in its logs."""


def ranks_of_trial(job: Job, nproc: int | None) -> int | None:
    """Ranks of each trial: --nproc, those of a pinned layout, or the fewest in whose memory the job fits, so that most
    trials run at once."""
    if nproc is not None or job.parallel != "auto":
        return nproc
    most = make_plan(job)[1].world
    for ranks in (1 << i for i in range(most.bit_length())):
        try:
            described, plan = make_plan(job, ranks)
        except (FitError, JobError):
            continue
        memory = plan.predicted.get("memory_gib", 0.0)  # of a module of your own it is measured by the ranks
        if memory <= device_memory(described, device_for(described, probe()), probe(), ranks):
            return ranks
    return None
