"""The records of the queue: what a machine has, what a claim asks for, and what it holds."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from weft.extensions.queue.atomic_files import read_public

State = Literal["waiting", "held"]
WAITING: State = "waiting"
HELD: State = "held"
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Time = Annotated[float, Field(allow_inf_nan=False)]


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

    gpus: Count = 0
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of each of the GPUs."""
    cores: Count = 0
    memory_gib: Amount = 0.0

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
    pid: Count
    started: Time
    """When the process with this pid started; a later process with the same pid is another."""
    boot: str
    """The boot of the machine in which the claim was made. Claims do not survive a reboot."""
    created: Time
    priority: int = 0
    idle_s: Time = 0.0
    run: str = ""
    """Folder of the run, if it is one."""
    state: State = WAITING
    since: Time = 0.0
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
        """The record in a file; None if it is damaged."""
        try:
            found = _record_form().validate_json(read_public(path, uid), strict=True)
        except (OSError, ValueError):
            return None
        return replace(found, uid=uid, seen=seen) if found.id == path.stem else None

    @classmethod
    def unreadable(cls, claim_id: str, machine: Capacity, boot: str, uid: int, seen: float) -> ClaimRecord:
        """A claim whose processes run, but whose record is damaged: it may hold anything, so it holds everything."""
        gpus = tuple(gpu.uuid for gpu in machine.gpus)
        request = Request(len(gpus), 1.0, len(machine.cores), machine.memory_gib)
        return cls(
            claim_id, "damaged record", request, 0, 0.0, boot, seen, state=HELD, since=seen, gpus=gpus,
            cores=machine.cores, uid=uid, seen=seen,
        )  # fmt: skip


@functools.cache
def _record_form() -> TypeAdapter[ClaimRecord]:
    return TypeAdapter(ClaimRecord)
