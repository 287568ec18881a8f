"""The parent process of a supervised run: starts and restarts the processes that the supervisor requests.

`weft train` is the process manager. The supervisor is a child like the ranks, so a killed supervisor is replaced
without disturbing them. When the manager itself is killed, Linux ends all its children.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from weft.hardware.network import use_loopback
from weft.job.errors import Exit, MachineError
from weft.job.files.run_folder import RunDir
from weft.job.files.store_path import replace
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.supervisor.attempt import write_start
from weft.supervisor.failure_report import remove_failures, write_failure
from weft.supervisor.fork_server import WORKER, ForkedProcess, ForkServer, as_subreaper
from weft.supervisor.hang_detection import SupervisorWatch
from weft.supervisor.local_ranks import CLEAN_EXITS, KILLED_BY_USER, rank_module
from weft.supervisor.memory_folder import memory_folder
from weft.supervisor.run_lock import RunLock
from weft.supervisor.status_board import PHASES, TRAINING, StatusBoard
from weft.supervisor.stop_signals import KILL_AFTER_INTERRUPTS, STOP_CODES, SignalForwarder, signals_blocked
from weft.supervisor.wakeup import wake_on_signals
from weft.watch.journal import Journal, record_early_stop

POLL_S = 1.0
"""Poll interval when nothing wakes the manager."""
MIN_SUPERVISOR_LIFE_S, MAX_SHORT_LIVES = 2.0, 5
"""A supervisor that exits within this time, this many times in a row, cannot work here."""
SUPERVISOR = ("weft.supervisor.supervisor",)
FIRST_STEP_GRACE_S = 5.0
"""How long ranks may take to stop by themselves, after a signal, while the run has not committed a step."""


def run_supervised(
    run: RunDir,
    job: Job,
    plan: Plan,
    slots: int,
    lock: RunLock,
    log: Callable[[str], None],
    supervisor: tuple[str, ...] = SUPERVISOR,
    node: str = "",
    began: float | None = None,
    fork_server: ForkServer | None = None,
) -> int:
    """Train the run in this folder under a supervisor, with so many ranks here. Returns the exit code.

    `began` is when the command began (time.time); `fork_server` is one that was started before the run was planned.
    """
    remove_failures(run)
    run.logs.mkdir(parents=True, exist_ok=True)
    with memory_folder(log) as folder:
        try:
            board = StatusBoard(folder / "board", slots=slots + job.resilience.spares)
            board["manager"] = os.getpid()
            write_start(folder, job, plan, began or time.time())
            _write_pointer(run, folder, node)
            with as_subreaper() as can_fork:
                manager = ProcessManager(run, job, slots, folder, board, lock, supervisor, can_fork)
                manager.early_fork_server = fork_server
                code = manager.keep(log)
            for line in _read_final_lines(folder) if code != KILLED_BY_USER else ():
                log(line)
            return code
        finally:
            pointer_path(run, node).unlink(missing_ok=True)


def pointer_path(run: RunDir, node: str = "") -> Path:
    """The file with the path of the shared memory of a running run."""
    return run.path / f".supervisor{node and '-'}{node}.json"


def _write_pointer(run: RunDir, folder: Path, node: str) -> None:
    content = {"folder": str(folder), "run": str(run.path.resolve()), "manager": os.getpid()}
    replace(pointer_path(run, node), json.dumps(content).encode())


def _read_final_lines(folder: Path) -> list[str]:
    try:
        lines: list[str] = json.loads((folder / "end.json").read_text(encoding="utf-8"))
        return lines
    except (OSError, ValueError):
        return []


Process = subprocess.Popen[bytes] | ForkedProcess


class ProcessManager:
    def __init__(
        self,
        run: RunDir,
        job: Job,
        world: int,
        folder: Path,
        board: StatusBoard,
        lock: RunLock,
        command: tuple[str, ...],
        can_fork: bool,
    ):
        self.run, self.world, self.folder, self.board, self.lock = run, world, folder, board, lock
        self.command, self.can_fork = command, can_fork
        self.signals = SignalForwarder()
        self.slots: dict[int, Process] = {}
        self.fork_server: ForkServer | None = None
        self.early_fork_server: ForkServer | None = None
        """A fork server that has not been given a run."""
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.supervised_since, self.short_lives = 0.0, 0
        self.supervisor_fault = ""
        """Why this process killed the supervisor."""
        self.supervisor_watch = SupervisorWatch(job.resilience.patience_s)
        self.stopped_at: float | None = None
        """When the first stop signal was handled (time.monotonic)."""

    def keep(self, log: Callable[[str], None]) -> int:
        wakeup = self.board.wakeup("manager")
        with self.signals, wake_on_signals(wakeup):
            try:
                if self.can_fork:
                    self._fork_server()  # it imports torch while the supervisor starts
                self._start_supervisor()
                self.signals.unblock()
                while not self.board["end"] and not self.signals.killed:
                    self.lock.check()
                    self._look(log)
                    wakeup.wait(POLL_S, *self._fork_server_files())
            finally:
                if self.fork_server is not None:
                    self.fork_server.close()
                for process in [*self.slots.values(), *([self.supervisor] if self.supervisor else [])]:
                    process.kill()
                    process.wait()
            if self.signals.killed:
                return KILLED_BY_USER
            if (code := self.board["end"] - 1) not in CLEAN_EXITS:
                self.lock.check()  # which may be the cause
            return code

    def _fork_server_files(self) -> tuple[int, ...]:
        return (
            ()
            if self.fork_server is None or self.fork_server.process.poll() is not None
            else (self.fork_server.fileno(),)
        )

    def _look(self, log: Callable[[str], None]) -> None:
        if self.signals.received:
            if signal.SIGINT in self.signals.received and self.stopped_at is None:
                log(f"saving and stopping; Ctrl-C {KILL_AFTER_INTERRUPTS} times in all ends the run without saving")
            self._stop(int(STOP_CODES[signal.Signals(self.signals.received[0])]))
        if self.supervisor is not None and self.supervisor.poll() is not None:
            lived = time.monotonic() - self.supervised_since
            self.short_lives = self.short_lives + 1 if lived < MIN_SUPERVISOR_LIFE_S else 0
            if self.short_lives == MAX_SHORT_LIVES:
                raise MachineError(
                    f"the supervisor of {self.run.path} exits as soon as it is started; its error is above"
                )
            if number := self.board["published"]:  # the next one has to import its modules before it can
                step = max(record.step for record in self.board.records())
                with Journal(self.run) as journal:
                    journal.event(
                        "fault", fault="supervisor", rank=None, position="", attempt=number, detected_after_s=None,
                        step=step, why=f"the supervisor {self.supervisor_fault or 'was killed'} and is replaced",
                    )  # fmt: skip
            self._start_supervisor()
        elif self.supervisor is not None and (
            problem := self.supervisor_watch.problem(self.supervisor.pid, self.board["supervisor_beats"])
        ):
            self.supervisor_fault = problem
            self.supervisor.kill()
        for slot, pid in self.fork_server.new_processes() if self.fork_server is not None else ():
            self.board.put(slot, "pid", pid)
        for slot in range(self.board.slots):
            process = self.slots.get(slot)
            if process is not None and (code := process.poll()) is not None:
                self.signals.remove(self.slots.pop(slot))
                code = self._early_exit(slot) if code == Exit.DONE else code
                for name, value in (("want", 0), ("phase", PHASES.index("gone")), ("code", code)):
                    self.board.put(slot, name, value)
                self.board.put(slot, "deaths", self.board.get(slot, "deaths") + 1)
            elif process is None and self.board.get(slot, "want"):
                self._start_slot(slot)

    def _early_exit(self, slot: int) -> int:
        """The exit code of a rank that ended with 0: a failure, which is recorded, if the run was not over."""
        record = self.board.record(slot)
        if record.phase == "end" or record.rank < 0:
            return int(Exit.DONE)
        message = (
            f"rank {record.rank} ended with exit code 0 in step {record.step + 1}, before the run was over; os._exit "
            "in code of the job, or exit in C code, would do that"
        )
        cause = {
            "rank": record.rank, "position": "", "time": time.time(), "kind": "SystemExit", "message": message,
            "where": record.phase, "expected": True, "echo": False, "machine": False, "code": int(Exit.DIFFERS),
        }  # fmt: skip
        write_failure(self.run, record.rank, cause)
        return int(Exit.DIFFERS)

    def _stop(self, code: int) -> None:
        """After a stop signal: ranks with steps to save end by themselves. Before the first step the run ends
        here, since a rank that waits for data, a compiler or another rank handles no signal."""
        self.board["stop"] = code
        self.stopped_at = self.stopped_at or time.monotonic()
        records = self.board.records()
        alone = self.command == SUPERVISOR  # nodes have to agree
        if not alone or self.board["published"] > 1 or any(r.deaths or r.committed for r in records):
            return
        begun = all(r.phase in TRAINING for r in records[: self.world])  # else all agree to stop before the first step
        if not begun or time.monotonic() - self.stopped_at > FIRST_STEP_GRACE_S:
            record_early_stop(self.run, code)
            self.board["end"] = code + 1

    def _start_slot(self, slot: int) -> None:
        self.board.clear(slot)
        if self.can_fork:
            self.slots[slot] = self._fork_server().fork(slot)
        else:
            self.slots[slot] = self._start([rank_module(WORKER), str(self.run.path)], {"WEFT_SLOT": str(slot)})
        self.board.put(slot, "pid", self.slots[slot].pid)
        self.signals.add(self.slots[slot])

    def _fork_server(self) -> ForkServer:
        if self.fork_server is not None and self.fork_server.process.poll() is not None:
            self.fork_server.close()
            self.fork_server = None
        if self.fork_server is None:
            self.fork_server = self.early_fork_server or ForkServer("-m", rank_module(WORKER))
            self.early_fork_server = None
            self.fork_server.begin(self.run.path, self._environment({}), self.lock.handles)
        return self.fork_server

    def _start_supervisor(self) -> None:
        self.supervised_since = time.monotonic()
        self.supervisor_fault, self.board["supervisor_beats"] = "", 0
        self.supervisor = self._start([self.command[0], str(self.run.path), str(self.folder), *self.command[1:]], {})
        self.board["supervisor"] = self.supervisor.pid

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        """The environment of the processes of the run."""
        ours = {"WEFT_MEMORY": str(self.folder), "WEFT_LAUNCHER": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        env = {**os.environ, **more, **ours}
        if self.command == SUPERVISOR:
            use_loopback(env)
        env.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its thread count later
        return env

    def _start(self, command: list[str], more: dict[str, str]) -> subprocess.Popen[bytes]:
        env = self._environment(more)
        with signals_blocked():  # a session of its own, so that Ctrl-C reaches only the manager, which forwards it once
            command = [sys.executable, "-m", *command]
            return subprocess.Popen(command, env=env, start_new_session=True, pass_fds=self.lock.handles)
