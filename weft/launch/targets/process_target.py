"""Targets whose runs are started by a process of this machine: local, ssh and mpi."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from weft.job.errors import JobError, MachineError
from weft.launch.process_start import running_process
from weft.launch.targets.driver import DRIVER_FILE
from weft.launch.targets.target import (
    EXIT_FILE,
    OUTPUT,
    JobState,
    JobStatus,
    LaunchRecord,
    LaunchRequest,
    Submission,
    Target,
    read_exit_code,
)

START_TIMEOUT_S = 30.0


class ProcessTarget(Target):
    """A target whose only command is run by weft/launch/targets/driver.py on this machine."""

    forwarded: signal.Signals | None = None
    """What the command is sent instead of stop signals, if it would kill the ranks at those."""

    def submit(self, request: LaunchRequest, submission: Submission) -> str:
        folder = request.launch_folder
        for name in (EXIT_FILE, DRIVER_FILE):
            (folder / name).unlink(missing_ok=True)
        mode = ["attached" if request.attached else "detached", str(int(self.forwarded or 0))]
        (command,) = submission.commands
        with (folder / OUTPUT).open("wb") as output:
            driver = subprocess.Popen(
                [sys.executable, "-m", "weft.launch.targets.driver", str(folder), *mode, *command],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd=request.workdir,
                env={**os.environ, **request.environment()},
            )  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (folder / DRIVER_FILE).exists():
            if driver.poll() is not None or time.monotonic() > deadline:
                raise MachineError(f"the run could not be started; see {folder / OUTPUT}")
            time.sleep(0.01)
        return str(driver.pid)

    def status(self, record: LaunchRecord) -> JobStatus:
        if (code := read_exit_code(record.launch_folder)) is not None:
            return JobStatus(JobState.ENDED, code)
        if record.host != socket.gethostname():
            return JobStatus(JobState.RUNNING, detail=f"on {record.host}")
        if _driver(record.launch_folder) is not None:
            return JobStatus(JobState.RUNNING)
        code = read_exit_code(record.launch_folder)  # written since
        return JobStatus(JobState.LOST) if code is None else JobStatus(JobState.ENDED, code)

    def stop(self, record: LaunchRecord) -> None:
        self._signal(record, signal.SIGTERM)

    def kill(self, record: LaunchRecord) -> None:
        """Three Ctrl-C end a run without saving."""
        for _ in range(3):
            self._signal(record, signal.SIGINT)
            time.sleep(0.2)

    def interrupt(self, record: LaunchRecord) -> None:
        """Forward Ctrl-C."""
        self._signal(record, signal.SIGINT)

    def _signal(self, record: LaunchRecord, number: int) -> None:
        if record.host != socket.gethostname():
            raise JobError(f"{record.run} was launched on {record.host}; stop it there")
        process = _driver(record.launch_folder)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def run_process(command: list[str], timeout_s: float = 300.0) -> str:
    """The output of a command; a MachineError with its last line if it fails."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise MachineError(f"{command[0]} did not end within {timeout_s:.0f} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise MachineError(lines[-1].removeprefix("weft: "))
    return done.stdout


def _driver(folder: Path) -> psutil.Process | None:
    """The running driver of a launch; None if it has exited."""
    try:
        found = json.loads((folder / DRIVER_FILE).read_text(encoding="utf-8"))
        return running_process(found)
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return None
