"""`queue`: what the run claims of a machine that several users share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.job.section import Section, limits


class Queue(Section):
    """The claim of this run on each machine, where `weft queue init` has made a queue. The run waits for it."""

    claim: bool | Literal["auto"] = "auto"
    """Claim resources before training. auto: if this machine has a queue."""
    gpus: int | Literal["auto"] = "auto"
    """GPUs on each machine. auto: as many as the plan uses."""
    share: float = Field(1.0, gt=0, le=1)
    """Fraction of each GPU, where the queue allows sharing. The plan then uses this part of the GPU's memory."""
    cores: int | Literal["auto"] = "auto"
    """Cores on each machine, to which the processes are bound. auto: all of them for a run on CPUs, none on GPUs."""
    memory_gib: float | Literal["auto"] = "auto"
    """Host memory on each machine. auto: as much as the plan predicts."""
    priority: int = Field(0, ge=-1000, le=1000)
    """Claims with a higher priority go first; at equal priority, users who used less."""
    idle_minutes: float | None = Field(None, ge=0)
    """Minutes without CPU time after which the claim, and the run, ends with exit code 75. Default: the queue's; 0:
    never."""
    wait: bool = True
    """Wait for resources that are not free; otherwise exit with code 4."""

    _check_counts = limits("gpus", "cores", valid=lambda n: 0 <= n <= 10**6, must="a number from 0 up, or auto")
    _check_memory = limits("memory_gib", valid=lambda gib: gib >= 0, must="GiB from 0 up, or auto")
