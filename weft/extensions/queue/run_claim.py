"""The claim of a `weft train` run."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.extensions.queue.claim import INSIDE_CLAIM, claim
from weft.extensions.queue.queue_folder import QueueFolder, queue_path
from weft.extensions.queue.records import Request
from weft.hardware.probe import probe
from weft.job.errors import JobError, MachineError
from weft.job.schema import Job
from weft.planner import Plan, make_plan


@contextlib.contextmanager
def claimed_for_run(
    job: Job, nproc: int | None, log: Callable[[str], None], nodes: int = 1
) -> Iterator[tuple[Job, int | None, tuple[int, ...]]]:
    """Hold this machine's part of a run in the context, if the machine has a queue; this process is restricted to it.

    `nodes`: machines of the run, with `nproc` ranks each. Yields the job and the number of ranks on this machine to
    plan with, and the open files that the ranks have to inherit.
    """
    queue = queue_of(job)
    if queue is None:
        yield job, nproc, ()
        return
    if nproc is None and job.queue.gpus != "auto":
        nproc = job.queue.gpus or None
    planned = job.model_copy(update={"cluster": job.cluster.model_copy(update={"nodes": nodes})}) if nodes > 1 else job
    request = request_of(job, make_plan(planned, nproc * nodes if nproc else None)[1], queue)
    with claim(
        queue, request, name=job.name, run=str((Path(job.runs_dir) / job.name).absolute()),
        priority=job.queue.priority, idle_minutes=job.queue.idle_minutes, wait=job.queue.wait, log=log,
        on_idle=lambda: os.kill(os.getpid(), signal.SIGTERM),  # the run saves and ends with exit code 75
    ) as held, held.applied():  # fmt: skip
        yield _with_shared_memory(job, request, held.queue), nproc, (held.handle,)


def queue_of(job: Job) -> QueueFolder | None:
    """The queue of this machine, if it has one and this process is not inside a claim of it."""
    if job.queue.claim is False or INSIDE_CLAIM in os.environ:
        return None
    path = queue_path()
    if not (path / "settings.json").exists():
        if job.queue.claim is True:
            raise MachineError(f"queue.claim=true, but {path} is not a queue; weft queue init makes it")
        return None
    return QueueFolder(path)


def request_of(job: Job, plan: Plan, queue: QueueFolder) -> Request:
    """What a run asks for on one machine."""
    ranks = -(-plan.world // max(1, plan.nodes))
    on_gpus = plan.device == "cuda"
    if on_gpus and job.queue.gpus == 0:
        raise JobError("queue.gpus=0, but the run trains on GPUs; cluster.device=cpu, or queue.gpus=auto would work")
    gpus = min(ranks, len(probe().gpus) or ranks) if on_gpus else 0
    cores = 0 if on_gpus else len(queue.settings.machine.cores)
    memory = ranks * (plan.host_gib if on_gpus else plan.predicted.get("memory_gib", 0.0))
    asked = job.queue
    return Request(
        gpus if asked.gpus == "auto" else asked.gpus,
        asked.share,
        cores if asked.cores == "auto" else asked.cores,
        round(memory, 3) if asked.memory_gib == "auto" else asked.memory_gib,
    )


def _with_shared_memory(job: Job, request: Request, queue: QueueFolder) -> Job:
    """The job with its part of the memory of shared GPUs."""
    if not request.gpus or request.share == 1 or job.memory.device_gib is not None:
        return job
    memory = min(gpu.memory_gib for gpu in queue.settings.machine.gpus) * request.share
    return job.model_copy(update={"memory": job.memory.model_copy(update={"device_gib": memory})})
