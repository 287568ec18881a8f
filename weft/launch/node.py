"""`weft train` as one node of several."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

from weft.hardware.pod_environment import export_node_variables
from weft.hardware.rank_environment import MAX_WORLD, node_info, whole_number
from weft.job.errors import Exit, MachineError
from weft.job.files.run_folder import RunDir
from weft.job.files.store_path import check_conditional_writes
from weft.job.schema import Job
from weft.launch.open_files import ensure_open_files
from weft.launch.run_files import write_job_and_plan
from weft.launch.train import check_store, finish, prepare
from weft.planner.make_plan import start_plan
from weft.planner.plan import AXES
from weft.supervisor.failure_report import keep_lines, record_failure
from weft.supervisor.local_ranks import CLEAN_EXITS, KILLED_BY_USER
from weft.supervisor.nodes.node_address import NodeAddress
from weft.supervisor.process_manager import run_supervised
from weft.supervisor.run_lock import run_lock
from weft.watch.follower import following
from weft.wire.secret import share_secret
from weft.wire.tls import check_tls_package


def this_node(job: Job, nproc: int | None) -> NodeAddress | None:
    """The node that this process supervises; None for a single node, or if a launcher starts every rank."""
    export_node_variables()
    if (found := node_info()) is not None:
        os.environ.setdefault("NODE_RANK", str(found.node))
        os.environ.setdefault("NNODES", str(found.count))
        os.environ.setdefault("MASTER_ADDR", found.master)
        for name in [name for name in os.environ if name.startswith("PMI")]:
            del os.environ[name]  # srun sets them for programs that are not MPI programs too
    by_environment = "NODE_RANK" in os.environ and "NNODES" in os.environ
    by_torchrun = "RANK" in os.environ and nproc is not None
    return NodeAddress.from_env(job.resilience.bind) if by_environment or by_torchrun else None


def ranks_per_node(job: Job, nodes: int) -> int:
    """Ranks on each node where --nproc is not given: the job's, else what this machine supports."""
    if job.cluster.devices_per_node != "auto":
        return job.cluster.devices_per_node
    world = start_plan(job.model_copy(update={"cluster": job.cluster.model_copy(update={"nodes": 1})})).world
    pinned = job.parallel != "auto" and -1 not in (getattr(job.parallel, axis) for axis in AXES)
    return max(1, world // nodes) if pinned else world


def start_node(
    job: Job, place: NodeAddress, nproc: int | None, log: Callable[[str], None] = print, inherit: tuple[int, ...] = ()
) -> int:
    """Start `nproc` ranks on this node and train with the other nodes. Returns the exit code.

    `inherit`: open files for all processes.
    """
    if whole_number(os.environ, "LOCAL_WORLD_SIZE", 0, MAX_WORLD, 1) != 1 and "NODE_RANK" not in os.environ:
        raise MachineError("--nproc starts the ranks of a node: let torchrun start one process a node, or leave it out")
    if job.cluster.max_nodes is not None:  # an elastic run starts with the least nodes, and others join
        place = replace(place, count=job.cluster.nodes)
    nodes = max(place.count, 1)
    slots = nproc or ranks_per_node(job, nodes)
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"nodes": nodes})})
    job, plan = prepare(job, slots * nodes)
    run = RunDir(Path(job.runs_dir) / job.name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        os.environ.pop(name, None)  # they describe this process, not its ranks
    ensure_open_files(plan.world)
    if job.comm.encrypt:
        check_tls_package()
    check_store(job, run)
    check_conditional_writes(run.shared(job.checkpoint.to), "checkpoint.to")
    with run_lock(run, shared=True, inherit=inherit) as lock, run_lock(RunDir(run.path / "nodes" / str(place.node))):
        if job.checkpoint.to:
            share_secret(run.shared(job.checkpoint.to), run.path)
        if place.node == 0 or job.checkpoint.to or not (run.job.exists() and run.plan.exists()):
            write_job_and_plan(run, job, plan)
        where = json.dumps({**asdict(place), "slots": slots})
        supervisor = ("weft.supervisor.nodes.node_supervisor", where)
        lines: list[str] = []
        with following(run, job, log) if place.node == 0 else nullcontext():
            kept = keep_lines(log, lines)
            code = run_supervised(run, job, plan, slots, lock, kept, supervisor, str(place.node))
            if place.node == 0:
                record_failure(run, code, lines)
    if code == KILLED_BY_USER:
        log("stopped without saving; start the same command again to resume from the last checkpoint")
        return int(Exit.INTERRUPTED)
    if code in CLEAN_EXITS and place.node == 0:
        finish(run, log)
    return code
