"""`weft queue init` and `weft queue run`: make the queue of this machine, and run any command in a claim."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from weft.extensions.queue.claim import claim
from weft.extensions.queue.queue_folder import QueueFolder
from weft.extensions.queue.records import Capacity, QueuedGpu, Request
from weft.hardware.probe import probe
from weft.job.errors import MachineError

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)


def this_machine() -> Capacity:
    """The GPUs, cores and memory that this process may use."""
    machine = probe()
    cores = sorted(os.sched_getaffinity(0), key=_core_order)
    gpus = tuple(QueuedGpu(gpu.uuid, gpu.name, gpu.memory_gib) for gpu in machine.gpus)
    return Capacity(gpus, tuple(cores), round(machine.memory_gib, 3))


def _core_order(thread: int) -> tuple[int, int]:
    """Hardware threads of one physical core are neighbours in the order of the queue."""
    path = Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
    try:
        first = path.read_text(encoding="ascii").replace("-", ",").split(",")[0]
        return int(first), thread
    except (OSError, ValueError):
        return thread, thread


def run_command(
    queue: QueueFolder, request: Request, command: Sequence[str], *, name: str, priority: int,
    idle_minutes: float | None, wait: bool, log: Callable[[str], None],
) -> int:  # fmt: skip
    """Run a command in a claim. Returns its exit code, or 128 + the signal that ended it."""
    child: subprocess.Popen[bytes] | None = None

    def end() -> None:
        if child is not None:
            child.terminate()

    with claim(
        queue, request, name=name, priority=priority, idle_minutes=idle_minutes, wait=wait, log=log, on_idle=end
    ) as held:
        with held.applied():
            try:
                child = subprocess.Popen(command, pass_fds=(held.handle,))
            except OSError as error:
                raise MachineError(f"{command[0]} cannot be started: {error.strerror}") from None
        code = _wait_for(child)
    return code if code >= 0 else 128 - code


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """Wait for the command, with signals passed on. Ctrl-C reaches it from the terminal."""

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
