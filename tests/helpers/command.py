"""Run the command line in real processes, and read the files of their runs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from helpers.forked_python import TEMPLATE_ENV, Popen
from weft.job.files.run_folder import RunDir
from weft.watch.journal import read_jsonl

DEADLINE_S = 300.0

ENV = {**TEMPLATE_ENV, "COLUMNS": "120"}


@dataclass(frozen=True)
class Output:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.err.strip().splitlines()[-1]


def weft(folder: Path, *args: str, deadline_s: float = DEADLINE_S) -> Output:
    """Run a command and wait for it."""
    return python(folder, "-m", "weft", *args, deadline_s=deadline_s)


def python(
    folder: Path,
    *args: str,
    deadline_s: float = DEADLINE_S,
    popen: type[subprocess.Popen[Any]] = Popen,
    **variables: str,
) -> Output:
    """Run Python with these environment variables and wait for it, in a fork unless `popen` is that of subprocess."""
    pipe, env = subprocess.PIPE, ENV | variables
    with popen([sys.executable, *args], cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=deadline_s)
        finally:
            process.kill()
    return Output(process.returncode, out, err)


def start_node(folder: Path, node: int, count: int, *overrides: str) -> subprocess.Popen[str]:
    """Start one of several nodes, with one rank on a CPU. On a busy machine it may be silent for some time."""
    env = {**ENV, "NODE_RANK": str(node), "NNODES": str(count), "MASTER_ADDR": "127.0.0.1"}
    words = ["-m", "weft", "train", "job.yaml", "--nproc", "1", "cluster.device=cpu", "resilience.node_lost_s=60"]
    command = [sys.executable, *words, *overrides]
    return Popen(command, env=env, cwd=folder, stderr=subprocess.PIPE, text=True)


class Started:
    """A command that runs in the background."""

    def __init__(self, folder: Path, *args: str, under: Sequence[str] = (), **variables: str):
        self.log = folder / "said.txt"
        with self.log.open("w", encoding="utf-8") as file:
            self.process = Popen(
                [sys.executable, *under, "-m", "weft", *args], cwd=folder, env=ENV | variables, stdout=file, stderr=file
            )

    def ranks(self) -> list[psutil.Process]:
        """The processes it started, in rank order; without processes that have no rank yet."""
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.NoSuchProcess):  # the command has ended
            for process in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error, KeyError):  # it has just exited, or has no rank
                    found[int(process.environ()["RANK"])] = process
        return [found[rank] for rank in sorted(found)]

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Wait for a condition; the command must not end before."""
        until(lambda: what() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text(encoding="utf-8")

    def wait_for_end(self, meanwhile: Callable[[], None]) -> None:
        """Call `meanwhile` repeatedly until the command ends."""

        def ended() -> bool:
            meanwhile()
            return self.process.poll() is not None

        until(ended)

    def end(self) -> Output:
        code = self.process.wait(DEADLINE_S)
        return Output(code, "", self.log.read_text(encoding="utf-8"))


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline, "the condition did not become true within the deadline"
        time.sleep(0.02)


def write_job(folder: Path, **sections: Any) -> None:
    """Write job.yaml without rebalancing, which would change the bits of the result on a busy machine."""
    sections["resilience"] = {"rebalance": False, **sections.get("resilience", {})}
    (folder / "job.yaml").write_text(yaml.safe_dump(sections), encoding="utf-8")


def run_of(folder: Path, name: str) -> RunDir:
    return RunDir(folder / "runs" / name)


def losses(run: RunDir) -> dict[int, list[float]]:
    """Every recorded loss of every step."""
    output: dict[int, list[float]] = {}
    for record in read_jsonl(run.metrics):
        output.setdefault(record["step"], []).append(record["loss"])
    return output


_read_steps: dict[tuple[Path, int], tuple[int, int]] = {}
"""Of each file of metrics, by path and inode: the bytes that were read, and the highest step in them."""


def step_of(run: RunDir) -> int:
    """The highest recorded step. Tests ask many times a second, so only lines that were added since are read."""
    if not run.metrics.exists():
        return 0
    with run.metrics.open("rb") as file:
        key = run.metrics, os.fstat(file.fileno()).st_ino
        done, step = _read_steps.get(key, (0, 0))
        if file.seek(0, os.SEEK_END) < done:  # begun anew
            done = step = 0
        file.seek(done)
        lines, newline, _ = file.read().rpartition(b"\n")
    for line in lines.split(b"\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # the end of a killed process's line
            step = max(step, json.loads(line)["step"])
    _read_steps[key] = done + len(lines) + len(newline), step
    return step


def ids_by_step(run: RunDir) -> dict[int, list[int]]:
    """The samples of each step, over all ranks."""
    found: dict[int, list[int]] = {}
    for path in sorted(run.samples.glob("rank-*.jsonl")):
        for line in read_jsonl(path):
            found.setdefault(line["step"], []).extend(line["ids"])
    return found


def strays(words: Sequence[str]) -> list[int]:
    """Processes whose command line contains all the words."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if all(word in line for word in words):
            found.append(process.pid)
    return found
