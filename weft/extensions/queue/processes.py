"""The processes of a claim: their CPU time, which of them hold it, and how they are ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from weft.extensions.queue.queue_folder import QueueFolder, is_locked
from weft.extensions.queue.records import ClaimRecord
from weft.job.errors import MachineError
from weft.launch.process_start import start_time

GRACE_S, POLL_S = 15.0, 0.05
"""Time that processes have to save and end after SIGTERM."""


def children_cpu_s(pid: int) -> float:
    """CPU seconds of the descendants of a process."""
    total = 0.0
    try:
        processes = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return total
    for process in processes:
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.Error:
            continue
    return total


def is_stopped(claim: ClaimRecord) -> bool:
    """Whether the owner of a claim is stopped, as by Ctrl-Z: it holds its resources without using them."""
    try:
        status = psutil.Process(claim.pid).status()
        return start_time(claim.pid) == claim.started and status == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def holders(lock: Path) -> list[int]:
    """Processes that have a claim's lock file open. Root sees those of all users."""
    found = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(file) == str(lock) for file in folder.iterdir()):
                found.append(int(folder.parent.name))
        except OSError:
            continue
    return found


def end_claim(queue: QueueFolder, claim: ClaimRecord, log: Callable[[str], None], grace_s: float = GRACE_S) -> None:
    """End the processes of a claim: SIGTERM to the first, so that a run saves; after a while SIGKILL to all."""
    lock = queue.lock_path(claim.id).resolve()
    pids = holders(lock)
    if not pids and is_locked(lock):
        raise MachineError(f"claim {claim.id} is held by processes of another user; only they or root can end it")
    # a process keeps its pid and start time; another one with this pid must not be signalled
    first = [claim.pid] if claim.pid in pids and start_time(claim.pid) == claim.started else pids
    _signal(first, signal.SIGTERM)
    _signal(first, signal.SIGCONT)
    deadline = time.monotonic() + grace_s
    while is_locked(lock):
        if time.monotonic() > deadline:
            _signal(left := holders(lock), signal.SIGKILL)
            log(f"claim {claim.id}: {len(left)} processes did not end in {grace_s:.0f} s and were killed")
            deadline = time.monotonic() + grace_s
        time.sleep(POLL_S)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        except PermissionError:
            raise MachineError(f"process {pid} belongs to another user; only they or root can end it") from None
