"""The process that starts a run of the targets local, ssh and mpi, and writes its exit code.

python -m weft.launch.targets.driver FOLDER attached|detached COMMAND…
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import FrameType

from weft.job.errors import Exit
from weft.launch.process_start import own_record
from weft.launch.targets.target import EXIT_FILE
from weft.supervisor.stop_signals import STOP_CODES, handled_signals

DRIVER_FILE = "driver.json"
"""The driver's pid and start time."""


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when its parent exits."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def write_json(path: Path, content: object) -> None:
    """Write a file atomically."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)


def run_command(command: list[str]) -> int:
    """Run a command to which stop signals are forwarded. Returns its exit code."""
    received: deque[int] = deque()
    child: subprocess.Popen[bytes] | None = None

    def forward_all() -> None:
        """Send each signal once; a handler may interrupt this function."""
        with contextlib.suppress(IndexError):
            while child is not None:
                child.send_signal(received.popleft())

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        forward_all()

    for number in handled_signals():
        signal.signal(number, forward)
    # a session of its own, so that Ctrl-C in the terminal is forwarded once
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent
    )  # this process has one thread
    forward_all()
    code = child.wait()
    if code < 0:  # it was killed
        return int(STOP_CODES.get(signal.Signals(-code), Exit.DIFFERS))
    return code


def main() -> int:
    folder, command = Path(sys.argv[1]), sys.argv[3:]
    if sys.argv[2] == "attached":
        end_with_parent()
    write_json(folder / DRIVER_FILE, own_record())
    code = run_command(command)
    write_json(folder / EXIT_FILE, {"code": code})
    return code


if __name__ == "__main__":
    sys.exit(main())
