"""Entry point of one process of a run: `python -m weft.extensions.server.main RUN chief|server|worker INDEX [CLIENT]`.

The launcher starts these. Another worker can be started by hand while the run goes on, for example `worker 9`; in a
federated run, a CLIENT number restricts it to that client.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from weft.hardware.cpu_process import keep_freed_memory, threads_for
from weft.job.errors import Exit, MachineError
from weft.job.files.run_folder import RunDir
from weft.job.load import load_job
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.supervisor.local_ranks import die_with_parent
from weft.training.garbage_collection import no_collection
from weft.training.rank import exit_code, exit_process, record_failure
from weft.training.stop_requests import Signals


def run_server(run: RunDir, job: Job, plan: Plan, index: int) -> Exit:
    """Serve one shard, and register with the chief whenever a chief starts."""
    from weft.extensions.server.chief import build_whole_model, make_shard
    from weft.extensions.server.connections import Connections
    from weft.extensions.server.rendezvous import chief_address
    from weft.extensions.server.server_shard import ShardCoordinator
    from weft.extensions.server.worker import CHIEF_TIMEOUT_S
    from weft.watch import logs
    from weft.wire.channel import WireError
    from weft.wire.secret import run_secret
    from weft.wire.tensors import open_tensor_channel

    log = logs.setup(run, index, f"server {index}", plan.world)
    shard = make_shard(run, job, build_whole_model(job, plan)[0], index)
    connections = Connections(job, run_secret(run.path), ShardCoordinator(shard), log)
    seen = time.monotonic()
    while time.monotonic() - seen < CHIEF_TIMEOUT_S:
        try:
            link = open_tensor_channel(chief_address(run), run_secret(run.path), job.comm.encrypt)
            link.request({"role": "server", "name": f"server {index}", "index": index, "address": connections.address})
            seen = time.monotonic()
            link.receive()  # blocks until the connection closes
        except (WireError, OSError, KeyError, ValueError):
            time.sleep(0.05)
    raise MachineError(f"server {index} cannot reach the first server of {run.path}")


def run_worker(run: RunDir, job: Job, plan: Plan, index: int, about: dict[str, Any]) -> Exit:
    """Compute tasks until the chief has none left."""
    from weft.extensions.server.federated_client import train_client
    from weft.extensions.server.worker import compute_share, make_worker, run_tasks
    from weft.watch import logs

    logs.setup(run, index, f"worker {index - first_worker(job)}", plan.world)
    does = {"server": compute_share, "federated": train_client}[plan.sync]
    run_tasks(make_worker(run, job, plan, f"worker {index - first_worker(job)}", about), does)
    return Exit.DONE


def first_worker(job: Job) -> int:
    """Index of the first worker; servers come before it."""
    return job.train.sync.servers


def run_process(run: RunDir, role: str, index: int, about: dict[str, Any]) -> int:
    """Run one process and return its exit code; a failure is recorded in logs/failure-INDEX.json, as for ranks."""
    signals = Signals()
    job, plan = load_job(str(run.job)), Plan.from_json(json.loads(run.plan.read_text(encoding="utf-8")))
    with no_collection():
        import torch

        from weft.extensions.server.chief import run_chief
        from weft.precision import choose_cpu_kernels

    if plan.device == "cpu":
        choose_cpu_kernels()
        keep_freed_memory()
        torch.set_num_threads(threads_for(plan.world))
    os.environ["LOCAL_RANK"] = str(max(0, index - first_worker(job)))
    try:
        if role == "chief":
            return int(run_chief(run, job, plan, signals))
        return int(run_server(run, job, plan, index) if role == "server" else run_worker(run, job, plan, index, about))
    except BaseException as error:
        record_failure(run, index, f"{role} {index}", error, plan)
        return exit_code(error)
    finally:
        signals.ignore()


def main(arguments: list[str]) -> int:
    folder, role, index, *client = arguments
    return run_process(RunDir(Path(folder)), role, int(index), {"client": int(client[0])} if client else {})


if __name__ == "__main__":
    if "WEFT_SERVED" in os.environ:
        die_with_parent()
    exit_process(main(sys.argv[1:]))
