"""`weft train` as one node of several: a supervisor here, which agrees with those of the other nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from weft.job.errors import Exit, MachineError
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.launch.train import close, prepare, write_description
from weft.supervisor.local_ranks import KILLED, QUIET, locked
from weft.supervisor.nodes.address import Place
from weft.supervisor.process_manager import guard


def this_node(job: Job, nproc: int | None) -> Place | None:
    """Which node this process is to supervise; None where it is the only one, or torchrun starts every rank."""
    by_hand = "NODE_RANK" in os.environ and "NNODES" in os.environ
    by_torchrun = "RANK" in os.environ and nproc is not None
    return Place.from_env(job.resilience.bind) if by_hand or by_torchrun else None


def start_node(job: Job, place: Place, nproc: int | None, say: Callable[[str], None] = print) -> int:
    """Train as a node: start `nproc` ranks here, and go on with whatever nodes there are. Returns the exit code."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) != 1 and "NODE_RANK" not in os.environ:
        raise MachineError("--nproc starts the ranks of a node: let torchrun start one process a node, or leave it out")
    slots = nproc or prepare(job)[1].world
    nodes = max(place.count, 1)
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"nodes": nodes})})
    job, plan = prepare(job, slots * nodes)
    run = RunDir(Path(job.runs_dir) / job.name)
    (run.path / "nodes").mkdir(parents=True, exist_ok=True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        os.environ.pop(name, None)  # they spoke of this process, and its ranks are told otherwise
    with locked(RunDir(run.path / "nodes" / str(place.node))) as lock:
        if place.node == 0 or not (run.job.exists() and run.plan.exists()):
            write_description(run, job, plan)
        where = json.dumps({**asdict(place), "slots": slots})
        supervisor = ("weft.supervisor.nodes.node_supervisor", where)
        code = guard(run, slots, job.resilience.spares, lock, say, supervisor, str(place.node))
    if code == KILLED:
        say("ended at once, without saving; start the same command again to resume from the last checkpoint")
        return int(Exit.INTERRUPTED)
    if code in QUIET and place.node == 0:
        close(run, say)
    return code
