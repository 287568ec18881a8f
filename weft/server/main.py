"""A process of a run through a server: `python -m weft.server.main RUN chief|server|worker INDEX [CLIENT]`.

The launcher starts them. A person may let another worker join a run while it goes on, `worker 9` for example; in a
federated run a CLIENT after it trains for that client alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from weft.job.errors import Exit, MachineError
from weft.job.load import load_job
from weft.job.run_folder import RunDir
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.supervisor.local_ranks import die_with_parent
from weft.training.imports import importing
from weft.training.rank import end, exit_code, explain, keep_freed_memory, threads_for
from weft.training.signals import Signals


def serve(run: RunDir, job: Job, plan: Plan, index: int) -> Exit:
    """Hold a shard for whoever knows the secret, and tell every chief that comes where it is."""
    from weft.server.chief import make_shard, whole_master_params
    from weft.server.connections import Hub
    from weft.server.rendezvous import chief_address
    from weft.server.shard import ShardDesk
    from weft.server.worker import PATIENCE_S
    from weft.watch import logs
    from weft.wire.channel import WireError
    from weft.wire.secret import run_secret
    from weft.wire.tensors import connect

    log = logs.setup(run, index, f"server {index}", plan.world)
    shard = make_shard(run, job, whole_master_params(job, plan)[0], index)
    hub = Hub(job.train.sync.host, run_secret(run.path), ShardDesk(shard), log)
    seen = time.monotonic()
    while time.monotonic() - seen < PATIENCE_S:
        try:
            link = connect(chief_address(run), run_secret(run.path))
            link.request({"role": "server", "name": f"server {index}", "index": index, "address": hub.address})
            seen = time.monotonic()
            link.receive()  # nothing comes, but the end
        except (WireError, OSError, KeyError, ValueError):
            time.sleep(0.05)
    raise MachineError(f"server {index} cannot reach the first server of {run.path}")


def toil(run: RunDir, job: Job, plan: Plan, index: int, about: dict[str, Any]) -> Exit:
    """Work until there is nothing left to do."""
    from weft.server.federated_client import train_client
    from weft.server.worker import gradient, make_worker, work
    from weft.watch import logs

    logs.setup(run, index, f"worker {index - first_worker(job)}", plan.world)
    does = {"server": gradient, "federated": train_client}[plan.sync]
    work(make_worker(run, job, plan, f"worker {index - first_worker(job)}", about), does)
    return Exit.DONE


def first_worker(job: Job) -> int:
    """Servers are numbered first."""
    return job.train.sync.servers


def play(run: RunDir, role: str, index: int, about: dict[str, Any]) -> int:
    """One process of a run; like a rank, it leaves a reason behind when it fails."""
    signals = Signals()
    job, plan = load_job(str(run.job)), Plan.from_json(json.loads(run.plan.read_text(encoding="utf-8")))
    with importing():
        import torch

        from weft.server.chief import lead

    if plan.device == "cpu":
        keep_freed_memory()
        torch.set_num_threads(threads_for(plan.world))
    os.environ["LOCAL_RANK"] = str(max(0, index - first_worker(job)))
    try:
        if role == "chief":
            return int(lead(run, job, plan, signals))
        return int(serve(run, job, plan, index) if role == "server" else toil(run, job, plan, index, about))
    except BaseException as error:
        explain(run, index, f"{role} {index}", error, plan)
        return exit_code(error)
    finally:
        signals.ignore()


def main(words: list[str]) -> int:
    folder, role, index, *client = words
    return play(RunDir(Path(folder)), role, int(index), {"client": int(client[0])} if client else {})


if __name__ == "__main__":
    if "WEFT_SERVED" in os.environ:
        die_with_parent()
    end(main(sys.argv[1:]))
