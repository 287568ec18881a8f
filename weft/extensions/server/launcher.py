"""Start the servers and workers of a run on this machine, and restart those that are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from weft.extensions.server.rendezvous import prepare_rendezvous
from weft.job.errors import Exit
from weft.job.files.run_folder import RunDir
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.supervisor.failure_report import explain_failure, remove_failures
from weft.supervisor.local_ranks import CLEAN_EXITS, KILLED_BY_USER
from weft.supervisor.run_lock import RunLock
from weft.supervisor.stop_signals import SignalForwarder, signals_blocked

MODULE = "weft.extensions.server.main"
MAX_RESTARTS = 100
"""Restarts of killed processes in one run."""
EXIT_TIMEOUT_S = 15.0
"""Time that servers and workers get to exit after the chief."""


@dataclass
class RoleProcess:
    """A role in the run and the process that currently has it."""

    role: str
    index: int
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return "server 0" if self.role == "chief" else f"{self.role} {self.index}"


def train_with_servers(run: RunDir, job: Job, plan: Plan, lock: RunLock, log: Callable[[str], None]) -> int:
    """Start the processes of a run of `train.sync=server` or `federated`. Returns the exit code."""
    prepare_rendezvous(run, job)
    return launch_server_run(run, job.train.sync.servers, plan.world, lock, log)


def launch_server_run(run: RunDir, servers: int, workers: int, lock: RunLock, log: Callable[[str], None]) -> int:
    """Start the processes of the run in this folder and wait for the chief. Returns the exit code."""
    remove_failures(run)
    run.logs.mkdir(parents=True, exist_ok=True)
    with SignalForwarder() as signals:
        roles = ["chief", *["server"] * (servers - 1), *["worker"] * workers]
        places = []
        for index, role in enumerate(roles):
            places.append(RoleProcess(role, index, _start(run, role, index, lock)))
            if role == "chief":
                signals.add(places[0].process)  # only the chief receives signals; it stops the others
        signals.unblock()
        try:
            code = _watch(run, places, signals, lock, log)
        finally:
            for place in places:
                with contextlib.suppress(ProcessLookupError):
                    place.process.kill()
                place.process.wait()
    return code


def _start(run: RunDir, role: str, index: int, lock: RunLock) -> subprocess.Popen[bytes]:
    env = {**os.environ, "WEFT_SERVED": "1", "PYTHONUNBUFFERED": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    env.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", MODULE, str(run.path), role, str(index)]
    with signals_blocked():  # a new session, so that Ctrl-C reaches only the launcher
        return subprocess.Popen(command, env=env, start_new_session=True, pass_fds=lock.handles)


def _watch(
    run: RunDir, places: list[RoleProcess], signals: SignalForwarder, lock: RunLock, log: Callable[[str], None]
) -> int:
    """Wait until the chief ends, restarting killed processes."""
    chief, restarts = places[0], 0
    while not signals.killed:
        lock.check()
        for place in places:
            code = place.process.poll()
            if code is None or (code in CLEAN_EXITS and place is not chief):
                continue
            if place is chief and code in CLEAN_EXITS:
                _let_go(places[1:])
                return code
            if code < 0 and not (run.logs / f"failure-{place.index}.json").exists() and restarts < MAX_RESTARTS:
                restarts += 1
                name = signal.Signals(-code).name
                log(f"{place.name} was killed by {name}; restarting it")
                before, place.process = place.process, _start(run, place.role, place.index, lock)
                if place is chief:
                    signals.remove(before)
                    signals.add(place.process)
                continue
            codes = [p.process.poll() or 0 for p in places]
            return explain_failure(run, codes, place.index, [], log)
        if chief.process.poll() is None and all(p.process.poll() is not None for p in places if p.role == "worker"):
            _let_go([chief])  # workers exit only at the end of a run
            if chief.process.poll() is None:
                log("all workers exited before the end of the run; see logs/")
                return int(Exit.DIFFERS)
        time.sleep(0.02)
    return KILLED_BY_USER


def _let_go(places: list[RoleProcess]) -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for place in places:
        if place.role != "server":  # servers wait for a new chief and do not exit by themselves
            with contextlib.suppress(subprocess.TimeoutExpired):
                place.process.wait(max(0.0, deadline - time.monotonic()))
