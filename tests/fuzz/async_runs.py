"""Short `server:async` runs, one after the other: `python -m tests.fuzz.async_runs [COUNT] [SEED]`.

Every run must end with code 0 and a checkpoint of its last step. Its processes are forks of this one, so that torch is
imported once; workers start at random moments.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import weft.extensions.server.worker  # noqa: F401
from weft.checkpoint.format import newest_good
from weft.extensions.server.main import run_process
from weft.extensions.server.rendezvous import prepare_rendezvous
from weft.job import parse_job
from weft.job.files.run_folder import RunDir
from weft.launch.run_files import RunFiles
from weft.launch.train import prepare
from weft.training.rank import exit_process, import_training

END_S = 120.0
"""How long a run may take."""
JOB: dict[str, Any] = {
    "model": {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32},
    "data": {"seq_len": 16, "source": "synthetic"},
    "checkpoint": {"every": 0},
    "cluster": {"device": "cpu"},
    "watch": {"every": 1000},
}


def train_once(folder: Path, chance: random.Random) -> str:
    """One run; returns what went wrong, or empty."""
    workers, steps = chance.choice((1, 2, 3)), chance.randint(1, 6)
    train = {"steps": steps, "global_batch": 6, "eval_every": chance.choice((0, 2)), "sync": "server:async"}
    job, plan = prepare(
        parse_job({**JOB, "name": folder.name, "runs_dir": str(folder.parent), "train": train}), workers
    )
    run = RunDir(folder)
    run.logs.mkdir(parents=True)
    RunFiles(run, created=True).write(job, plan)
    prepare_rendezvous(run, job)
    roles = [("chief", 0), *(("worker", 1 + i) for i in range(workers))]
    children = {role: _fork(run, *role, after_s=chance.uniform(0.0, 0.3) * (role[1] > 0)) for role in roles}
    try:
        code = _wait(children[roles[0]])
    finally:
        for pid in list(children.values())[1:]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    saved = newest_good(run.checkpoints)
    failures = "; ".join(path.read_text() for path in run.logs.glob("failure-*.json"))
    if code == 0 and saved is not None and saved.step == steps:
        return ""
    return f"{workers} workers, {steps} steps: code {code}, saved {saved and saved.step} {failures}"


def _fork(run: RunDir, role: str, index: int, after_s: float) -> int:
    if pid := os.fork():
        return pid
    with open(run.logs / f"output-{index}.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    time.sleep(after_s)
    exit_process(run_process(run, role, index, {}))


def _wait(pid: int) -> int | None:
    """The exit code of a child; None if it is still running after END_S, in which case it is killed."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main(count: int = 200, seed: int = 0) -> int:
    failures = 0
    with tempfile.TemporaryDirectory(prefix="weft-async-") as base:
        import_training()
        for number in range(count):
            problem = train_once(Path(base) / f"run-{number}", random.Random(f"{seed} {number}"))
            failures += bool(problem)
            if problem:
                print(f"{number}: {problem}", flush=True)
    print(f"{count} runs, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    exit_process(main(*map(int, sys.argv[1:])))
