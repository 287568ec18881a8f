"""Run local ranks without a supervisor: start one process a rank and wait for all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from weft.hardware.network import use_loopback
from weft.job.errors import Exit
from weft.job.run_folder import RunDir
from weft.supervisor.failure_report import explain_failure
from weft.supervisor.memory_folder import memory_folder
from weft.supervisor.run_lock import RunLock
from weft.supervisor.stop_signals import SignalForwarder

GRACE_S = 10.0
"""How long the other ranks may take to exit after one has failed."""

KILLED_BY_USER = -int(Exit.INTERRUPTED)
"""Returned by launch() after that: interrupted without saving."""

CLEAN_EXITS = (int(Exit.DONE), int(Exit.PREEMPTED), int(Exit.INTERRUPTED))
"""Exit codes of ranks that finished or stopped on request."""


def die_with_parent() -> None:
    """Ask Linux to kill this process when its launcher exits."""
    if sys.platform == "linux":
        parent = int(os.environ.get("WEFT_LAUNCHER", os.getppid()))  # it may have exited already
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


WORKER = ("weft.training.rank",)
"""The module that a rank runs, and its arguments after the run folder."""


def rank_module(default: str) -> str:
    """The module that a rank runs. `weft chaos` sets WEFT_RANK_MODULE to one that injects faults."""
    return os.environ.get("WEFT_RANK_MODULE", default)


def launch(run: RunDir, world: int, lock: RunLock, log: Callable[[str], None], worker: tuple[str, ...] = WORKER) -> int:
    """Start the ranks of the run in this folder, wait for them, and print the cause if one failed. Returns the exit
    code."""
    for old in run.logs.glob("failure-*.json"):
        old.unlink()
    run.logs.mkdir(parents=True, exist_ok=True)
    with memory_folder(log) as folder:
        ranks: list[subprocess.Popen[bytes]] = []
        with SignalForwarder() as signals:
            try:
                for rank in range(world):
                    ranks.append(_start(run, rank, world, folder / "store", lock, worker))
                    signals.add(ranks[-1])
                signals.unblock()
                code = _watch(run, lock, ranks, lambda text: None if signals.killed else log(text))
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
        return KILLED_BY_USER if signals.killed else code


def _start(
    run: RunDir, rank: int, world: int, store: Path, lock: RunLock, worker: tuple[str, ...]
) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "WEFT_STORE": str(store),
        "WEFT_LAUNCHER": str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }
    use_loopback(env)
    env.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its thread count later
    # a session of its own, so that Ctrl-C reaches only the launcher, which forwards it once
    module = rank_module(worker[0]) if worker == WORKER else worker[0]
    command = [sys.executable, "-m", module, str(run.path), *worker[1:]]
    return subprocess.Popen(command, env=env, start_new_session=True, pass_fds=lock.handles)


def _watch(run: RunDir, lock: RunLock, ranks: list[subprocess.Popen[bytes]], log: Callable[[str], None]) -> int:
    failed_at: float | None = None
    first: int | None = None
    silent: list[int] = []
    while any(p.poll() is None for p in ranks):
        lock.check()
        bad = [i for i, p in enumerate(ranks) if p.poll() not in (None, *CLEAN_EXITS)]
        if bad and failed_at is None:
            failed_at, first = time.monotonic(), bad[0]
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S and not silent:
            silent = [i for i, p in enumerate(ranks) if p.poll() is None]
            for i in silent:
                ranks[i].kill()
        time.sleep(0.05)
    codes = [p.returncode for p in ranks]
    bad = [i for i, c in enumerate(codes) if c not in CLEAN_EXITS]
    if not bad:
        return max(codes)
    lock.check()
    return explain_failure(run, codes, first if first is not None else bad[0], silent, log)
