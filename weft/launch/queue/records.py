"""The records of the queue: what a machine has, what a claim asks for, and what it holds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WAITING, HELD = "waiting", "held"


@dataclass(frozen=True)
class QueuedGpu:
    """A GPU that the queue hands out."""

    uuid: str
    name: str
    memory_gib: float


@dataclass(frozen=True)
class Capacity:
    """What the queue of a machine hands out."""

    gpus: tuple[QueuedGpu, ...] = ()
    cores: tuple[int, ...] = ()
    """Numbers of the hardware threads; those of one physical core are neighbours."""
    memory_gib: float = 0.0


@dataclass(frozen=True)
class QueueSettings:
    """What the queue hands out and by which rules; `weft queue init` writes it."""

    machine: Capacity = Capacity()
    min_share: float = 1.0
    """Smallest fraction of a GPU that a claim may ask for; 1 means that GPUs are not shared."""
    idle_minutes: float = 120.0
    """Claims whose processes use no CPU time for this long end; 0: never."""
    half_life_hours: float = 24.0
    """Time after which past use counts half in the fair share."""
    max_priority: int = 10
    """Highest priority that users other than root may ask for."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of a user in the fair share; 1 for those not named."""

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> QueueSettings:
        machine = found.pop("machine")
        gpus = tuple(QueuedGpu(**gpu) for gpu in machine["gpus"])
        return cls(Capacity(gpus, tuple(machine["cores"]), machine["memory_gib"]), **found)


@dataclass(frozen=True)
class Request:
    """The resources that a claim asks for."""

    gpus: int = 0
    share: float = 1.0
    """Fraction of each of the GPUs."""
    cores: int = 0
    memory_gib: float = 0.0

    def __str__(self) -> str:
        part = f"{self.share:.0%} of " if self.share < 1 else ""
        words = [
            *([f"{part}{self.gpus} GPU{'s' * (self.gpus > 1)}"] if self.gpus else []),
            *([f"{self.cores} core{'s' * (self.cores > 1)}"] if self.cores else []),
            *([f"{self.memory_gib:.3g} GiB of memory"] if self.memory_gib else []),
        ]
        return ", ".join(words) or "nothing"


@dataclass(frozen=True)
class ClaimRecord:
    """A claim that waits or holds resources. Only its owner writes it."""

    id: str
    name: str
    """The run's name, or the command's."""
    request: Request
    pid: int
    started: float
    """When the process with this pid started; a later process with the same pid is another."""
    boot: str
    """The boot of the machine in which the claim was made. Claims do not survive a reboot."""
    created: float
    priority: int = 0
    idle_s: float = 0.0
    run: str = ""
    """Folder of the run, if it is one."""
    state: str = WAITING
    since: float = 0.0
    """When the resources were granted."""
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    uid: int = -1
    """Owner of the file; not written to it."""
    seen: float = 0.0
    """When the owner last used the claim; not written to the file."""

    @property
    def held(self) -> bool:
        return self.state == HELD

    def dumps(self) -> str:
        values = asdict(self)
        del values["uid"], values["seen"]
        return json.dumps(values)

    @classmethod
    def load(cls, path: Path, uid: int, seen: float) -> ClaimRecord | None:
        """The record in a file; None if it is damaged, which only its owner could do."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            found["request"] = Request(**found["request"])
            found["gpus"], found["cores"] = tuple(found["gpus"]), tuple(found["cores"])
            return cls(**found, uid=uid, seen=seen)
        except (OSError, ValueError, TypeError, KeyError):
            return None
