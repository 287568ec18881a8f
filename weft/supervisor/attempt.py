"""An attempt: one start of training with a fixed set of processes, described in a file that the ranks read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.job.files.run_folder import RunDir
from weft.job.load import dump_yaml, load_job
from weft.job.schema import Job
from weft.planner.plan import Plan
from weft.supervisor.memory_folder import write_file

BEGAN = "began"
"""File with the time at which the command began."""
NOT_CONNECTED = 79
"""Exit code of a rank whose attempt ended while it connected. torch counts the process groups that it has begun, and
names of keys in the store follow from the count, so this process could not meet a new one in another attempt."""


@dataclass(frozen=True)
class Attempt:
    """The ranks of an attempt and where they rendezvous. Ranks of another attempt number must not commit."""

    number: int
    world: int
    """Ranks of the run, on all nodes."""
    ranks: dict[int, int]
    """Slot of each rank on this node."""
    deaths: dict[int, int]
    """For each of these slots, how many processes had exited there before."""
    store: str
    """Path of the rendezvous file store, unique to the attempt."""
    began: float
    """When the command that started the run began (time.time)."""
    recovered: dict[str, Any] | None = None
    """The fault before this attempt: kind, how it was handled, and when it was detected. None for the first attempt."""
    faults: list[list[Any]] = field(default_factory=list)
    """Kind, rank, step, cause and attempt of every fault so far, used to detect a repeated fault. All kills of a burst
    have the attempt that the first of them ended."""
    environment: dict[str, str] = field(default_factory=dict)
    """Extra environment variables of the ranks, such as the rendezvous address."""
    idle: int = 0
    """Attempts in a row before this one that ended by a timeout without a new committed step."""
    burst: int = 0
    """The attempt that was ended by the first kill of the burst before this attempt; 0 after other faults."""
    burst_began: float = 0.0
    """When that was (time.monotonic)."""
    plan: dict[str, Any] = field(default_factory=dict)
    """The plan of this attempt, as JSON."""
    job: dict[str, Any] = field(default_factory=dict)
    """Its job, as JSON: on several nodes the leader's, whatever each node was started with."""

    def rank_of(self, slot: int) -> int | None:
        return next((rank for rank, s in self.ranks.items() if s == slot), None)


def write_start(folder: Path, job: Job, plan: Plan, began: float) -> None:
    """Write what this machine was started with, and when (time.time). The run's own files may still be those of an
    earlier start: the first of several nodes writes them."""
    write_file(RunDir(folder).job, dump_yaml(job))
    write_file(RunDir(folder).plan, plan.dumps())
    write_file(folder / BEGAN, repr(began))


def started_at(folder: Path) -> float:
    """When the command that started this machine's processes began."""
    return float((folder / BEGAN).read_text(encoding="utf-8"))


def started_job(folder: Path) -> Job:
    """The job that this machine was started with."""
    return load_job(str(RunDir(folder).job))


def started_plan(folder: Path) -> Plan:
    """The plan that this machine was started with."""
    return Plan.from_json(json.loads(RunDir(folder).plan.read_text(encoding="utf-8")))


def path_of(folder: Path, number: int) -> Path:
    return folder / f"attempt-{number}.json"


def write_attempt(folder: Path, attempt: Attempt) -> None:
    """Write the file atomically."""
    write_file(path_of(folder, attempt.number), json.dumps(asdict(attempt)))


def read_attempt(folder: Path, number: int) -> Attempt:
    content = json.loads(path_of(folder, number).read_text(encoding="utf-8"))
    for name in ("ranks", "deaths"):
        content[name] = {int(key): value for key, value in content[name].items()}
    return Attempt(**content)
