"""Run local ranks without a supervisor: start one process a rank and wait for all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

from weft.hardware.network import use_loopback
from weft.job.errors import Exit
from weft.job.files.run_folder import RunDir
from weft.supervisor.failure_report import explain_failure, remove_failures
from weft.supervisor.memory_folder import memory_folder
from weft.supervisor.run_lock import RunLock
from weft.supervisor.stop_signals import SignalForwarder
from weft.watch.journal import read_jsonl, record_early_stop

GRACE_S = 10.0
"""How long the other ranks may take to exit after one has failed."""

POLL_S = 0.05
"""How often the ranks are looked at."""

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
    with SignalForwarder() as signals, ExitStack() as stack:
        ends = _ends(run)
        ranks = stack.enter_context(rank_processes(run, world, lock, signals, log, worker))
        signals.unblock()
        while (code := ranks.poll()) is None:
            time.sleep(POLL_S)
        if signals.killed:
            return KILLED_BY_USER
        if code in (Exit.PREEMPTED, Exit.INTERRUPTED) and _ends(run) == ends:
            record_early_stop(run, code)
        return code


def _ends(run: RunDir) -> int:
    """How many starts of the run have recorded their end."""
    return sum(event.get("event") in ("stop", "done") for event in read_jsonl(run.events))


@contextmanager
def rank_processes(
    run: RunDir, world: int, lock: RunLock, signals: SignalForwarder, log: Callable[[str], None],
    worker: tuple[str, ...] = WORKER, output: Path | None = None,
) -> Iterator[RankProcesses]:  # fmt: skip
    """The ranks of a run, started. They are killed at the end of the context if they still run. What they print goes to
    the terminal, or is appended to `output`."""
    remove_failures(run)
    run.logs.mkdir(parents=True, exist_ok=True)
    with memory_folder(log) as folder, output.open("ab") if output else nullcontext() as file:
        ranks = RankProcesses(run, lock, signals, log)
        try:
            for rank in range(world):
                ranks.add(_start(run, rank, world, folder / "store", lock, worker, file))
            yield ranks
        finally:
            ranks.kill()


class RankProcesses:
    """The processes of the ranks of one run."""

    def __init__(self, run: RunDir, lock: RunLock, signals: SignalForwarder, log: Callable[[str], None]) -> None:
        self._run, self._lock, self._signals, self._log = run, lock, signals, log
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._failed_at: float | None = None
        self._first: int | None = None
        self._silent: list[int] = []

    def add(self, process: subprocess.Popen[bytes]) -> None:
        self._ranks.append(process)
        self._signals.add(process)

    def kill(self) -> None:
        """End the ranks that still run."""
        for process in self._ranks:
            process.kill()
            process.wait()
            self._signals.remove(process)

    def poll(self) -> int | None:
        """The exit code when all ranks have ended, else None. Kills the others some time after one has failed."""
        self._lock.check()
        ranks = self._ranks
        bad = [i for i, p in enumerate(ranks) if p.poll() not in (None, *CLEAN_EXITS)]
        if bad and self._failed_at is None:
            self._failed_at, self._first = time.monotonic(), bad[0]
        if any(p.poll() is None for p in ranks):
            if self._failed_at is not None and time.monotonic() - self._failed_at > GRACE_S and not self._silent:
                self._silent = [i for i, p in enumerate(ranks) if p.poll() is None]
                for i in self._silent:
                    ranks[i].kill()
            return None
        codes = [p.returncode for p in ranks]
        bad = [i for i, c in enumerate(codes) if c not in CLEAN_EXITS]
        if not bad:
            return max(codes)
        first = self._first if self._first is not None else bad[0]
        return explain_failure(
            self._run, codes, first, self._silent, lambda text: None if self._signals.killed else self._log(text)
        )


def _start(
    run: RunDir, rank: int, world: int, store: Path, lock: RunLock, worker: tuple[str, ...], output: BinaryIO | None
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
    return subprocess.Popen(
        command, env=env, start_new_session=True, pass_fds=lock.handles, stdout=output, stderr=output
    )
