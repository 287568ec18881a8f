"""A run observed from outside: its processes, and the lines it writes, with the time at which each appeared."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import psutil

from weft.extensions.chaos.accounting import Event, ObservedStep
from weft.extensions.chaos.virtual_hosts import VirtualHosts
from weft.job.files.run_folder import RunDir
from weft.job.load import dump_given
from weft.job.schema import Job
from weft.supervisor.process_manager import pointer_path
from weft.supervisor.status_board import TRAINING, StatusBoard
from weft.watch.run_tail import LineTail

POLL_S = 0.005
"""Poll interval."""
FAULTY_RANK = "weft.extensions.chaos.faulty_rank"
"""The module of the ranks of a run into which faults are injected."""


class ObservedRun:
    """`weft train` of one job, restarted as often as needed, on this machine or on virtual hosts."""

    def __init__(
        self, job: Job, nproc: int | None, env: dict[str, str] | None = None, hosts: VirtualHosts | None = None
    ):
        """`nproc` are the ranks on each host."""
        self.job, self.nproc, self.hosts = job, nproc, hosts
        self.run = RunDir(Path(job.runs_dir) / job.name)
        self.env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | (env or {})
        folder = self.run.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.output = folder / f"{job.name}.yaml", folder / f"{job.name}.log"
        self.file.write_text(dump_given(job), encoding="utf-8")
        self.output.write_text("", encoding="utf-8")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        """By node."""
        self.starts = 0
        self.lines: list[ObservedStep] = []
        self.events: list[Event] = []
        self._boards: dict[int, StatusBoard] = {}
        self._metrics, self._events = LineTail(self.run.metrics), LineTail(self.run.events)

    @property
    def nodes(self) -> int:
        return self.hosts.count if self.hosts else 1

    def start(self) -> None:
        for node in range(self.nodes):
            self.start_node(node)
        self.starts += 1

    def start_node(self, node: int) -> None:
        """Start the run on one node if it is not running there."""
        if node in self.processes and self.processes[node].poll() is None:
            return
        command = [sys.executable, "-m", "weft", "train", str(self.file)]
        command += ["--nproc", str(self.nproc)] if self.nproc else []
        with self.output.open("ab") as output:
            if self.hosts is None:
                self.processes[node] = subprocess.Popen(
                    command, env=self.env, stdout=output, stderr=output, start_new_session=True
                )
            else:
                place = {"NODE_RANK": str(node), "NNODES": str(self.nodes), "MASTER_ADDR": self.hosts.address(0)}
                self.processes[node] = self.hosts.start(
                    node, command, {**self.env, **place}, stdout=output, stderr=output, start_new_session=True
                )

    def look(self) -> int | None:
        """Read new lines. Returns the exit code once every process has ended, preferably of one that was not killed."""
        codes = [p.poll() for p in self.processes.values()]
        code = None if None in codes else max(codes, default=None, key=lambda c: (c is not None and c >= 0, c or 0))
        now = time.time()
        for record in self._metrics.read():
            seconds, step = record.get("step_time_s"), record.get("step")
            if isinstance(step, int):
                skipped = bool(record.get("skipped"))
                self.lines.append(ObservedStep(now, step, float(seconds or 0.0), record.get("loss"), skipped))
        for event in self._events.read():
            at = event.get("time")
            stamp = datetime.fromisoformat(at).timestamp() if isinstance(at, str) else now
            self.events.append({"event": "", **event, "time": min(stamp, now)})
        return code

    @property
    def step(self) -> int:
        """The newest committed step."""
        return self.lines[-1].step if self.lines else 0

    def wait_for(self, what: Callable[[], bool], timeout_s: float) -> int | None:
        """Poll until a condition holds or the run ends (returns its code); raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            code = self.look()
            if code is not None or what():
                return code
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(POLL_S)

    def board(self, node: int = 0) -> StatusBoard | None:
        """The status board of a node, while it runs with a supervisor."""
        try:
            name = str(node) if self.hosts else ""
            folder = Path(json.loads(pointer_path(self.run, name).read_text(encoding="utf-8"))["folder"])
            if node not in self._boards or self._boards[node].path.parent != folder:
                self._boards[node] = StatusBoard(folder / "board")
        except (OSError, ValueError, KeyError):
            self._boards.pop(node, None)
        return self._boards.get(node)

    def rank(self, number: int) -> tuple[str, int] | None:
        """Phase and pid of a rank of the current attempt; None if it is not training."""
        boards = [b for node in range(self.nodes) if (b := self.board(node)) is not None]
        if not boards:
            return self._unsupervised_rank(number)
        newest = max(board["attempt"] for board in boards)  # a lost node's board is stale
        for board in boards:
            for record in board.records():
                mine = record.rank == number and record.attempt == newest and psutil.pid_exists(record.pid)
                if mine and record.phase in TRAINING:
                    inside = record.inside and record.phase == "compute"
                    return "collective" if inside else record.phase, record.pid
        return None

    def rank_processes(self) -> dict[int, int]:
        """The pid of each rank's process in the newest attempt that it has joined, in whatever phase it is."""
        newest: dict[int, tuple[int, int]] = {}
        for board in (b for node in range(self.nodes) if (b := self.board(node)) is not None):
            for record in board.records():
                if record.rank >= 0 and record.phase != "gone" and psutil.pid_exists(record.pid):
                    newest[record.rank] = max(newest.get(record.rank, (0, 0)), (record.attempt, record.pid))
        return {rank: pid for rank, (_, pid) in newest.items()}

    def _unsupervised_rank(self, number: int) -> tuple[str, int] | None:
        """The same for a run without a supervisor, whose phase is unknown."""
        for process in self.processes.values():
            for child in _children(process.pid):
                with contextlib.suppress(psutil.Error, OSError):
                    if FAULTY_RANK in child.cmdline() and child.environ().get("RANK") == str(number):
                        return "any", child.pid
        return None

    def supervisor(self, node: int = 0) -> int | None:
        """The pid of the supervisor."""
        board = self.board(node)
        return board["supervisor"] or None if board else None

    def end(self) -> None:
        """Kill all processes."""
        for process in self.processes.values():
            children = _children(process.pid)
            process.kill()
            for child in children:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            process.wait()

    def last_line(self) -> str:
        words = [x for x in self.output.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
        return words[-1] if words else ""


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
