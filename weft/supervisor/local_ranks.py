"""Run local ranks without a supervisor: start one process a rank and wait for all of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from weft.hardware.network import use_loopback
from weft.job.errors import Exit
from weft.job.run_folder import RunDir
from weft.supervisor.failure_report import explain_failure

GRACE_S = 10.0
"""How long the other ranks may take to exit after one has failed."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save and stop."""

KILL_AFTER_INTERRUPTS = 3
"""Number of Ctrl-C after which the ranks are killed."""

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


def shared_memory() -> str | None:
    """A folder in memory, where the system has one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


WORKER = ("weft.training.rank",)
"""The module that a rank runs, and its arguments after the run folder."""


def rank_module(default: str) -> str:
    """The module that a rank runs. `weft chaos` sets WEFT_RANK_MODULE to one that injects faults."""
    return os.environ.get("WEFT_RANK_MODULE", default)


def launch(run: RunDir, world: int, lock: int, log: Callable[[str], None], worker: tuple[str, ...] = WORKER) -> int:
    """Start the ranks of the run in this folder, wait for them, and print the cause if one failed. Returns the exit
    code."""
    for old in run.logs.glob("failure-*.json"):
        old.unlink()
    run.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weft-", dir=shared_memory()) as folder:
        # ranks inherit the mask and unblock the signals once their handlers are installed
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        ranks: list[subprocess.Popen[bytes]] = []
        with forward_signals(ranks) as interrupts:
            for rank in range(world):
                ranks.append(_start(run, rank, world, Path(folder) / "store", lock, worker))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            code = _watch(run, ranks, lambda text: None if len(interrupts) >= KILL_AFTER_INTERRUPTS else log(text))
        return code if len(interrupts) < KILL_AFTER_INTERRUPTS else KILLED_BY_USER


def _start(
    run: RunDir, rank: int, world: int, store: Path, lock: int, worker: tuple[str, ...]
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
    return subprocess.Popen(command, env=env, start_new_session=True, pass_fds=(lock,))


class Signalled(Protocol):
    """A process that can be sent signals."""

    def send_signal(self, number: int, /) -> None: ...


@contextlib.contextmanager
def forward_signals(ranks: Sequence[Signalled]) -> Iterator[list[int]]:
    """Forward stop signals to every rank and kill the ranks at the third Ctrl-C; yields the interrupts received."""
    interrupts: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupts.append(number)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(signal.SIGKILL if len(interrupts) >= KILL_AFTER_INTERRUPTS else number)

    before = {n: signal.signal(n, forward) for n in STOP_SIGNALS}
    try:
        yield interrupts
    finally:
        if len(interrupts) >= KILL_AFTER_INTERRUPTS:  # further ones must not suppress the last lines
            before[signal.SIGINT] = signal.SIG_IGN
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # also if a rank could not be started


def _watch(run: RunDir, ranks: list[subprocess.Popen[bytes]], log: Callable[[str], None]) -> int:
    failed_at: float | None = None
    first: int | None = None
    silent: list[int] = []
    while any(p.poll() is None for p in ranks):
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
    return explain_failure(run, codes, first if first is not None else bad[0], silent, log)
