"""Trials of a rung, several at once: each claims its devices, cores and memory from the queue of this machine.

On a machine without a queue, or inside a claim, trials share a queue of their own over what this process may use.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from weft.extensions.queue.claim import claim
from weft.extensions.queue.machine import this_machine
from weft.extensions.queue.queue_folder import QueueFolder
from weft.extensions.queue.records import QueueSettings, Request
from weft.extensions.queue.run_claim import queue_of, request_of
from weft.job.errors import Exit, FitError, MachineError, WeftError
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.launch.run_files import RunFiles
from weft.launch.train import prepare
from weft.planner import make_plan
from weft.planner.plan import Plan
from weft.supervisor.local_ranks import POLL_S, RankProcesses, rank_processes
from weft.supervisor.run_lock import run_lock
from weft.supervisor.stop_signals import SignalForwarder, signals_blocked

CLAIM_POLL_S = 1.0
"""How often resources that others hold are asked for again."""


@contextmanager
def packed_trials(job: Job) -> Iterator[PackedTrials]:
    """A runner of trials that share the queue of the machine, or a queue of their own."""
    if (queue := queue_of(job)) is not None:
        yield PackedTrials(queue)
        return
    with tempfile.TemporaryDirectory(prefix="weft-tune-") as folder:
        yield PackedTrials(QueueFolder.create(Path(folder) / "queue", QueueSettings(this_machine(), idle_minutes=0)))


@dataclass(frozen=True)
class PackedTrials:
    """Runs trials as many at a time as a queue allows."""

    queue: QueueFolder

    def at_once(self, job: Job, nproc: int | None) -> int:
        """Trials for which the machine has the GPUs, cores and memory."""
        machine, request = self.queue.settings.machine, trial_request(job, make_plan(job, nproc)[1], self.queue)
        limits = [
            int(has / needs)
            for has, needs in (
                (len(machine.gpus), request.gpus * request.share), (len(machine.cores), request.cores),
                (machine.memory_gib, request.memory_gib),
            )
            if needs
        ]  # fmt: skip
        return max(1, min(limits, default=os.cpu_count() or 1))

    def run(
        self, jobs: Sequence[Job], nproc: int | None, worker: tuple[str, ...], report: Callable[[str], None]
    ) -> list[int]:
        """Run prepared folders of these jobs. Returns their exit codes."""
        return run_packed(jobs, nproc, self.queue, worker, report)


def trial_request(job: Job, plan: Plan, queue: QueueFolder) -> Request:
    """What a trial claims: on CPUs one core for each rank, unless the job says otherwise."""
    found = request_of(job, plan, queue)
    if plan.device == "cpu" and job.queue.cores == "auto":
        found = replace(found, cores=min(plan.world, len(queue.settings.machine.cores)))
    return found


@dataclass(frozen=True)
class RunningTrial:
    """A trial with its ranks, and what it holds."""

    number: int
    """Place in the list of trials."""
    run: RunDir
    ranks: RankProcesses
    held: ExitStack


def run_packed(
    jobs: Sequence[Job], nproc: int | None, queue: QueueFolder, worker: tuple[str, ...], report: Callable[[str], None]
) -> list[int]:
    """Run prepared folders of these jobs, as many at a time as the queue allows. Returns their exit codes."""
    codes: dict[int, int] = {}
    waiting, running = list(range(len(jobs))), list[RunningTrial]()
    ask_again_at, reported = 0.0, False
    with SignalForwarder() as signals, ExitStack() as everything:
        signals.unblock()
        while (waiting and not signals.received) or running:
            while waiting and not signals.received and time.monotonic() >= ask_again_at:
                started = _start(waiting[0], jobs[waiting[0]], nproc, queue, worker, signals)
                if started is None:
                    ask_again_at = time.monotonic() + CLAIM_POLL_S
                    if not running and not reported:
                        report("waiting for resources of this machine: weft queue shows the claims")
                        reported = True
                    break
                everything.push(started.held)
                running.append(started)
                waiting.pop(0)
            for trial in list(running):
                if (code := trial.ranks.poll()) is not None:
                    codes[trial.number] = int(Exit.INTERRUPTED) if signals.killed else code
                    trial.held.close()
                    running.remove(trial)
                    ask_again_at = 0.0
            time.sleep(POLL_S)
    if signals.received:
        stopped = WeftError("the search was stopped; the same command continues it")
        stopped.exit_code = Exit(max([c for c in codes.values() if c], default=int(Exit.INTERRUPTED)))
        raise stopped
    return [codes[number] for number in range(len(jobs))]


def _start(
    number: int, job: Job, nproc: int | None, queue: QueueFolder, worker: tuple[str, ...], signals: SignalForwarder
) -> RunningTrial | None:
    """Start a trial if what it needs is free."""
    request = trial_request(job, make_plan(job, nproc)[1], queue)
    with ExitStack() as stack:
        try:
            name = f"{Path(job.runs_dir).name}/{job.name}"
            held = stack.enter_context(claim(queue, request, name=name, priority=job.queue.priority, wait=False))
        except FitError:
            raise
        except MachineError:
            return None
        run = RunDir(Path(job.runs_dir) / job.name)
        with held.applied(), signals_blocked():
            job, plan = prepare(job, nproc)
            lock = stack.enter_context(run_lock(run, inherit=(held.handle,)))
            RunFiles(run, lock.created).write(job, plan)
            printed = run.logs / "trial.log"  # of several trials at once, a terminal would show a mixture
            ranks = stack.enter_context(rank_processes(run, plan.world, lock, signals, _quiet, worker, printed))
        return RunningTrial(number, run, ranks, stack.pop_all())


def _quiet(text: str) -> None:
    """Why a trial failed is in its logs."""
