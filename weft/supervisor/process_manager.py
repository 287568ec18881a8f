"""The parent of a resilient run: it keeps the processes that are wanted alive, and decides nothing.

`weft train` is the guardian. The supervisor is its child like the ranks are, so that killing the supervisor disturbs
nobody: the next one reads the board and goes on. When the guardian itself is gone, Linux ends all the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from weft.hardware.network import stay_home
from weft.job.errors import MachineError
from weft.job.run_folder import RunDir
from weft.supervisor.fork_server import Child, Nursery, adopting
from weft.supervisor.local_ranks import AT_ONCE, KILLED, WISHES, forwarding, rank_module, shared_memory
from weft.supervisor.status_board import PHASES, Board
from weft.supervisor.wakeup import rung_by_signals

LOOK_S = 1.0
"""It looks so often even if nothing rings: no child ended, nobody was born, and the supervisor wants nothing."""
SHORT_S, TRIES = 2.0, 5
"""A supervisor that ends so soon, as many times in a row, cannot work here."""
WORKER = "weft.training.supervised_rank"
"""The module of a rank or spare, unless WEFT_RANK_MODULE names another."""
SUPERVISOR = ("weft.supervisor.supervisor",)


def guard(
    run: RunDir,
    world: int,
    spares: int,
    lock: int,
    say: Callable[[str], None],
    supervisor: tuple[str, ...] = SUPERVISOR,
    node: str = "",
) -> int:
    """Train the run in this folder with a supervisor, until it says that it is over. Returns the exit code."""
    for old in run.logs.glob("failure-*.json"):
        old.unlink()
    run.logs.mkdir(parents=True, exist_ok=True)
    forget_memory(run, node)
    folder = Path(tempfile.mkdtemp(prefix="weft-", dir=shared_memory()))
    try:
        board = Board(folder / "board", slots=world + spares)
        board["guardian"] = os.getpid()
        _write_pointer(run, folder, node)
        with adopting() as can_adopt:
            code = _Guardian(run, world, folder, board, lock, supervisor, can_adopt).keep(say)
        for line in _last_words(folder) if code != KILLED else ():
            say(line)
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        pointer(run, node).unlink(missing_ok=True)


def pointer(run: RunDir, node: str = "") -> Path:
    """Where the memory of a running run is, for whoever wants to look at it from outside."""
    return run.path / f".supervisor{node and '-'}{node}.json"


def forget_memory(run: RunDir, node: str = "") -> None:
    """Free the memory of a run whose guardian was killed; only its own run's, and only if it is nobody's any more."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        left = json.loads(pointer(run, node).read_text(encoding="utf-8"))
        folder = Path(left["folder"])
        ours = folder.parent == Path(shared_memory() or tempfile.gettempdir()) and folder.name.startswith("weft-")
        if ours and left["run"] == str(run.path.resolve()) and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder)


def _write_pointer(run: RunDir, folder: Path, node: str) -> None:
    content = {"folder": str(folder), "run": str(run.path.resolve()), "guardian": os.getpid()}
    pointer(run, node).write_text(json.dumps(content), encoding="utf-8")


def _last_words(folder: Path) -> list[str]:
    try:
        lines: list[str] = json.loads((folder / "end.json").read_text(encoding="utf-8"))
        return lines
    except (OSError, ValueError):
        return []


Process = subprocess.Popen[bytes] | Child


class _Guardian:
    def __init__(
        self, run: RunDir, world: int, folder: Path, board: Board, lock: int, command: tuple[str, ...], can_adopt: bool
    ):
        self.run, self.world, self.folder, self.board, self.lock = run, world, folder, board, lock
        self.command, self.can_adopt = command, can_adopt
        self.ranks: list[Process] = []
        """The processes in slots, for signals."""
        self.slots: dict[int, Process] = {}
        self.nursery: Nursery | None = None
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.supervised_since, self.short_lives = 0.0, 0

    def keep(self, say: Callable[[str], None]) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, WISHES)  # a process inherits the mask and lifts it when it can answer
        bell = self.board.bell("guardian")
        with forwarding(self.ranks) as interrupts, rung_by_signals(bell):
            try:
                if self.can_adopt:
                    self._nursery()  # it imports while the supervisor decides
                self._start_supervisor()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, WISHES)
                while not self.board["end"] and len(interrupts) < AT_ONCE:
                    self._look()
                    bell.wait(LOOK_S, *self._births())
            finally:
                if self.nursery is not None:
                    self.nursery.close()
                for process in [*self.slots.values(), *([self.supervisor] if self.supervisor else [])]:
                    process.kill()
                    process.wait()
            return self.board["end"] - 1 if len(interrupts) < AT_ONCE else KILLED

    def _births(self) -> tuple[int, ...]:
        return () if self.nursery is None or self.nursery.process.poll() is not None else (self.nursery.fileno(),)

    def _look(self) -> None:
        if self.supervisor is not None and self.supervisor.poll() is not None:
            lived = time.monotonic() - self.supervised_since
            self.short_lives = self.short_lives + 1 if lived < SHORT_S else 0
            if self.short_lives == TRIES:
                raise MachineError(f"the supervisor of {self.run.path} ends as soon as it is started; see above why")
            self._start_supervisor()
        for slot, pid in self.nursery.births() if self.nursery is not None else ():
            self.board.put(slot, "pid", pid)
        for slot in range(self.board.slots):
            process = self.slots.get(slot)
            if process is not None and (code := process.poll()) is not None:
                self.ranks.remove(self.slots.pop(slot))
                for name, value in (("want", 0), ("phase", PHASES.index("gone")), ("code", code)):
                    self.board.put(slot, name, value)
                self.board.put(slot, "deaths", self.board.get(slot, "deaths") + 1)
            elif process is None and self.board.get(slot, "want"):
                self._start_slot(slot)

    def _start_slot(self, slot: int) -> None:
        self.board.clear(slot)
        if self.can_adopt:
            self.slots[slot] = self._nursery().ask(slot)
        else:
            self.slots[slot] = self._start([rank_module(WORKER), str(self.run.path)], {"WEFT_SLOT": str(slot)})
        self.board.put(slot, "pid", self.slots[slot].pid)
        self.ranks.append(self.slots[slot])

    def _nursery(self) -> Nursery:
        if self.nursery is not None and self.nursery.process.poll() is not None:
            self.nursery.close()
            self.nursery = None
        if self.nursery is None:
            self.nursery = Nursery(
                lambda env, files: self._start([rank_module(WORKER), str(self.run.path)], env, files)
            )
        return self.nursery

    def _start_supervisor(self) -> None:
        self.supervised_since = time.monotonic()
        self.supervisor = self._start([self.command[0], str(self.run.path), str(self.folder), *self.command[1:]], {})
        self.board["supervisor"] = self.supervisor.pid

    def _start(self, command: list[str], more: dict[str, str], files: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        ours = {"WEFT_MEMORY": str(self.folder), "WEFT_LAUNCHER": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        env = {**os.environ, **more, **ours}
        if self.command == SUPERVISOR:
            stay_home(env)
        env.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own number of threads once it knows its share
        was = signal.pthread_sigmask(signal.SIG_BLOCK, WISHES)
        try:
            # a session of its own: Ctrl-C reaches the guardian alone, which passes it on once
            command = [sys.executable, "-m", *command]
            return subprocess.Popen(command, env=env, start_new_session=True, pass_fds=(self.lock, *files))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, was)
