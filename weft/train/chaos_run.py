"""A run as a rehearsal sees it from outside: its processes, and the lines it leaves, each with the time it appeared."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from weft.job.load import dump_yaml
from weft.job.run import RunDir
from weft.job.schema import Job
from weft.resilience.account import Event, Line

LOOK_S = 0.005
"""How often an onlooker looks."""


class Tail:
    """The whole lines that a file has grown by since the last look."""

    def __init__(self, path: Path):
        self.path, self.position, self.rest = path, 0, b""

    def read(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                new = file.read()
        except FileNotFoundError:
            return
        self.position += len(new)
        *whole, self.rest = (self.rest + new).split(b"\n")
        for line in whole:
            with contextlib.suppress(ValueError):
                if isinstance(value := json.loads(line), dict):
                    yield value


class Watched:
    """`weft train` of one job, started as often as it takes."""

    def __init__(self, job: Job, nproc: int | None, env: dict[str, str] | None = None):
        self.job, self.nproc = job, nproc
        self.run = RunDir(Path(job.runs_dir) / job.name)
        self.env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | (env or {})
        folder = self.run.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.said = folder / f"{job.name}.yaml", folder / f"{job.name}.log"
        self.file.write_text(dump_yaml(job), encoding="utf-8")
        self.said.write_text("", encoding="utf-8")
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.lines: list[Line] = []
        self.events: list[Event] = []
        self._metrics, self._events = Tail(self.run.metrics), Tail(self.run.events)

    def start(self) -> None:
        command = [sys.executable, "-m", "weft", "train", str(self.file)]
        command += ["--nproc", str(self.nproc)] if self.nproc else []
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(command, env=self.env, stdout=said, stderr=said, start_new_session=True)
        self.starts += 1

    def look(self) -> int | None:
        """Take in what is new. Returns the exit code once the process has ended."""
        code = None if self.process is None else self.process.poll()
        now = time.time()
        for record in self._metrics.read():
            seconds, step = record.get("step_time_s"), record.get("step")
            if isinstance(step, int):
                skipped = bool(record.get("skipped"))
                self.lines.append(Line(now, step, float(seconds or 0.0), record.get("loss"), skipped))
        for event in self._events.read():
            at = event.get("time")
            stamp = datetime.fromisoformat(at).timestamp() if isinstance(at, str) else now
            self.events.append({"event": "", **event, "time": min(stamp, now)})
        return code

    @property
    def step(self) -> int:
        """The newest committed step."""
        return self.lines[-1].step if self.lines else 0

    def wait_for(self, what: Callable[[], bool], patience_s: float) -> int | None:
        """Look until something is so, or the process ends (then its code), or patience does (TimeoutError)."""
        deadline = time.monotonic() + patience_s
        while True:
            code = self.look()
            if code is not None or what():
                return code
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(LOOK_S)

    def ranks(self) -> dict[int, int]:
        """Process ids by rank."""
        found = {}
        if self.process is not None:
            for child in _children(self.process.pid):
                with contextlib.suppress(psutil.Error, OSError):
                    rank = child.environ().get("RANK")
                    if rank is not None and "weft.train.worker" in child.cmdline():
                        found[int(rank)] = child.pid
        return found

    def end(self) -> None:
        """Leave no process behind."""
        if self.process is None:
            return
        children = _children(self.process.pid)
        self.process.kill()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self.process.wait()

    def last_words(self) -> str:
        words = [x for x in self.said.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
        return words[-1] if words else ""


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
