"""A whole run on this machine: one process a rank, watched until the last has ended."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from weft.hardware.network import stay_home
from weft.job.errors import Exit, JobError
from weft.job.run_folder import RunDir

GRACE_S = 10.0
"""How long the other ranks may take to say what they saw after one has failed."""

WISHES = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save and stop."""

AT_ONCE = 3
"""As many times Ctrl-C, and the ranks are killed instead of asked."""

KILLED = -int(Exit.INTERRUPTED)
"""What launch() returns when it did: interrupted, and nothing was saved."""

QUIET = (int(Exit.DONE), int(Exit.PREEMPTED), int(Exit.INTERRUPTED))
"""Codes that are no failure: done, or stopped as asked."""


def die_with_parent() -> None:
    """Ask Linux to end this process when its launcher is gone, however it went."""
    if sys.platform == "linux":
        parent = int(os.environ.get("WEFT_LAUNCHER", os.getppid()))  # it may be gone already
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


@contextlib.contextmanager
def locked(run: RunDir, patience_s: float = 15.0) -> Iterator[int]:
    """One launcher at a time may use a run; its ranks inherit the lock, so it outlives a launcher that was killed."""
    run.path.mkdir(parents=True, exist_ok=True)
    handle = os.open(run.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                raise JobError(f"{run.path} is being trained by another process; wait for it, or give name=") from None
            time.sleep(0.05)
    try:
        yield handle
    finally:
        os.close(handle)


def shared_memory() -> str | None:
    """A folder whose files are memory, where the system has one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


WORKER = ("weft.training.rank",)
"""The module that a rank runs; what follows it are arguments after the run's folder."""


def rank_module(default: str) -> str:
    """The module that a rank runs. `weft chaos` sets WEFT_RANK_MODULE to one that injects faults."""
    return os.environ.get("WEFT_RANK_MODULE", default)


def launch(run: RunDir, world: int, lock: int, say: Callable[[str], None], worker: tuple[str, ...] = WORKER) -> int:
    """Start the ranks of the run in this folder, wait for them, and say why if one failed. Returns the exit code."""
    for old in run.logs.glob("failure-*.json"):
        old.unlink()
    run.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weft-", dir=shared_memory()) as folder:
        # a rank inherits the mask and lifts it when it can answer: no Ctrl-C is lost or shot at torch's import
        signal.pthread_sigmask(signal.SIG_BLOCK, WISHES)
        ranks: list[subprocess.Popen[bytes]] = []
        with forwarding(ranks) as interrupts:
            for rank in range(world):
                ranks.append(_start(run, rank, world, Path(folder) / "store", lock, worker))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WISHES)
            code = _watch(run, ranks, lambda text: None if len(interrupts) >= AT_ONCE else say(text))
        return code if len(interrupts) < AT_ONCE else KILLED


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
    stay_home(env)
    env.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own number of threads once it knows its share
    # a session of its own: Ctrl-C reaches the launcher alone, which passes it on once
    module = rank_module(worker[0]) if worker == WORKER else worker[0]
    command = [sys.executable, "-m", module, str(run.path), *worker[1:]]
    return subprocess.Popen(command, env=env, start_new_session=True, pass_fds=(lock,))


class Signalled(Protocol):
    """A process, as far as signals go."""

    def send_signal(self, number: int, /) -> None: ...


@contextlib.contextmanager
def forwarding(ranks: Sequence[Signalled]) -> Iterator[list[int]]:
    """Pass signals on to every rank, and kill them at the third Ctrl-C; yields the list of them."""
    interrupts: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupts.append(number)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(signal.SIGKILL if len(interrupts) >= AT_ONCE else number)

    before = {n: signal.signal(n, forward) for n in WISHES}
    try:
        yield interrupts
    finally:
        if len(interrupts) >= AT_ONCE:  # whoever is that impatient goes on; the last words are still to be said
            before[signal.SIGINT] = signal.SIG_IGN
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WISHES)  # also where a rank could not be started


def _watch(run: RunDir, ranks: list[subprocess.Popen[bytes]], say: Callable[[str], None]) -> int:
    failed_at: float | None = None
    first: int | None = None
    silent: list[int] = []
    while any(p.poll() is None for p in ranks):
        bad = [i for i, p in enumerate(ranks) if p.poll() not in (None, *QUIET)]
        if bad and failed_at is None:
            failed_at, first = time.monotonic(), bad[0]
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S and not silent:
            silent = [i for i, p in enumerate(ranks) if p.poll() is None]
            for i in silent:
                ranks[i].kill()
        time.sleep(0.05)
    codes = [p.returncode for p in ranks]
    bad = [i for i, c in enumerate(codes) if c not in QUIET]
    if not bad:
        return max(codes)
    return say_why(run, codes, first if first is not None else bad[0], silent, say)


def say_why(run: RunDir, codes: list[int], first: int, silent: list[int], say: Callable[[str], None]) -> int:
    """The last lines of a failed run: which rank, where it stands, what it was doing, what to try.

    `silent` are the ranks that we ended ourselves since they did nothing more.
    """
    causes = [cause for p in run.logs.glob("failure-*.json") if (cause := read_cause(p))]
    silent = [i for i in silent if not left_reason(run, i)]
    killed = [i for i, c in enumerate(codes) if c < 0 and not left_reason(run, i)]
    told = sorted((c for c in causes if not c["echo"]), key=lambda c: c["time"])
    timeouts_only = told and all(c["code"] == Exit.HANG for c in told)
    if timeouts_only and silent and set(killed) <= set(silent):
        return _say_silent(run, told[0], silent, say)
    if killed and (not told or timeouts_only or first in killed):
        rank = first if first in killed else killed[0]
        name = signal.Signals(-codes[rank]).name
        hint = "; if nobody sent it, memory may have run out: see dmesg, and try a smaller train.microbatch"
        say(f"rank {rank} was killed by {name}{hint if name == 'SIGKILL' else ''}")
        say(f"log: {run.logs / f'rank-{rank}.log'}; start the same command again to resume")
        return int(Exit.DIFFERS)
    known = told or sorted(causes, key=lambda c: c["time"])
    if not known:
        say(f"rank {first} ended with code {codes[first]} and left no reason; log: {run.logs / f'rank-{first}.log'}")
        return int(Exit.DIFFERS)
    cause = known[0]
    if cause["expected"]:
        say(f"weft: {cause['message']}")
        return int(cause["code"])
    say(f"{_who(cause)} failed in {cause['where']}: {cause['kind']}: {cause['message']}")
    log = run.logs / f"rank-{cause['rank']}.log"
    say(f"traceback: {log}; start the same command again to resume")
    return int(cause["code"])


def _say_silent(run: RunDir, waiter: dict[str, Any], silent: list[int], say: Callable[[str], None]) -> int:
    names = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
    say(f"{names} did not answer; {_who(waiter)} waited in {waiter['where']}: {waiter['kind']}: {waiter['message']}")
    log = run.logs / f"rank-{silent[0]}.log"
    say(f"log: {log}; start the same command again to resume, with a longer comm.timeout_s if it was only slow")
    return int(Exit.HANG)


def read_cause(path: Path) -> dict[str, Any] | None:
    """What a rank left behind; nothing if even that could not be written."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return None


def _who(cause: dict[str, Any]) -> str:
    return f"rank {cause['rank']} ({cause['position']})" if cause["position"] else f"rank {cause['rank']}"


def left_reason(run: RunDir, rank: int) -> bool:
    return read_cause(run.logs / f"failure-{rank}.json") is not None
