"""The process that starts a run of the targets local, ssh and mpi, and writes its exit code.

python -m weft.launch.targets.driver FOLDER attached|detached SIGNAL COMMAND…

SIGNAL (0: none) is sent instead of stop signals to a command that would kill its ranks at those.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from weft.job.errors import Exit
from weft.job.files.run_folder import RunDir
from weft.launch.process_start import own_record
from weft.launch.targets.target import EXIT_FILE, OUTPUT
from weft.supervisor.stop_signals import KILL_AFTER_INTERRUPTS, STOP_CODES, handled_signals

DRIVER_FILE = "driver.json"
"""The driver's pid and start time."""
TAIL_BYTES = 1 << 16
KILLED_RANK = re.compile(r"process rank (\d+) .*exited on signal \d+ \((.+)\)")
"""What mpirun prints about a rank that was killed."""


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when its parent exits."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def write_json(path: Path, content: object) -> None:
    """Write a file atomically."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)


def run_command(command: list[str], instead: int = 0) -> int:
    """Run a command to which stop signals are forwarded, or another signal `instead`. Returns the run's exit code."""
    received: deque[int] = deque()
    seen: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward_all() -> None:
        """Send each signal once; a handler may interrupt this function."""
        with contextlib.suppress(IndexError):
            while child is not None:
                child.send_signal(received.popleft())

    def forward(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        kill = seen.count(signal.SIGINT) >= KILL_AFTER_INTERRUPTS
        received.append((signal.SIGTERM if kill else instead) if instead else number)
        forward_all()

    for number in handled_signals():
        signal.signal(number, forward)
    # a session of its own, so that Ctrl-C in the terminal is forwarded once
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent
    )  # this process has one thread
    forward_all()
    return code_of_run(child.wait(), seen, starter=bool(instead))


def code_of_run(code: int, seen: Sequence[int], starter: bool) -> int:
    """The exit code of a run whose command ended with `code` after the signals `seen`. A `starter` of ranks returns
    128 + the signal that killed one."""
    if starter and code and signal.SIGINT in seen:
        return int(Exit.INTERRUPTED)
    number = -code if code < 0 else code - 128 if starter and code > 128 else 0
    return int(next((stop for n, stop in STOP_CODES.items() if n == number), Exit.DIFFERS)) if number else code


def started_nothing(run: RunDir, since: float) -> bool:
    """Whether the run has written no event since a time: its ranks were not started."""
    return not run.events.exists() or run.events.stat().st_mtime < since


def record_end(folder: Path, code: int) -> None:
    """Write the event `failed` of a run whose processes were killed before they could."""
    from weft.supervisor.failure_report import has_end, record_failure

    run = RunDir(folder.parent)
    if not run.events.exists() or has_end(run):
        return
    with (folder / OUTPUT).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        killed = KILLED_RANK.findall(file.read().decode(errors="replace"))
    record_failure(run, code, [f"rank {rank} was killed by a signal ({name})" for rank, name in killed[-1:]])


def main() -> int:
    folder, instead, command = Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4:]
    if sys.argv[2] == "attached":
        end_with_parent()
    write_json(folder / DRIVER_FILE, own_record())
    began = time.time()
    code = run_command(command, instead)
    if instead and code == Exit.DIFFERS and started_nothing(RunDir(folder.parent), began):
        code = int(Exit.MACHINE)
        print(f"weft: {command[0]} started no rank; the reason is above", file=sys.stderr)
    with contextlib.suppress(OSError):
        record_end(folder, code)
    write_json(folder / EXIT_FILE, {"code": code})
    return code


if __name__ == "__main__":
    sys.exit(main())
