"""A Job, assembled from its sections. The text under each field is its help; `weft schema` prints it as JSON Schema."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.job.cluster import Cluster, Failures, Group, Level
from weft.job.model import Experts, Model, RopeScaling
from weft.job.recipe import Data, Optim, Train
from weft.job.resilience import Resilience
from weft.job.section import Section
from weft.job.spread import Comm, Fp8, Memory, Parallel
from weft.job.sync import Sync

__all__ = [
    "Checkpoint", "Cluster", "Comm", "Data", "Experts", "Failures", "Fp8", "Group", "Job", "Level", "Memory", "Model",
    "Optim", "Parallel", "Resilience", "RopeScaling", "Section", "Sync", "Train", "Watch",
]  # fmt: skip


class Checkpoint(Section):
    """When the state of the run is written, and how much of it is kept."""

    every: int = Field(200, ge=0)
    """Steps between checkpoints; 0 writes only the last. The last step is always written."""
    keep: int = Field(3, ge=1)
    """Newest checkpoints kept."""
    keep_every: int = Field(0, ge=0)
    """Checkpoints whose step is a multiple of this are kept for ever; 0 keeps none for ever."""
    background: bool = True
    """Training goes on while a checkpoint is written."""


class Watch(Section):
    """What a person sees of the run."""

    every: int = Field(10, ge=1)
    """Steps between plain progress lines."""
    gantt_step: int = Field(5, ge=0)
    """The step of a pipelined run whose time line the report shows; 0 records none."""
    comm_every: int = Field(10, ge=0)
    """Steps between those whose communication is timed: its share of the step, what of it nothing hid, its speed. 0
    times none."""
    trackers: list[str] = Field(default_factory=list)
    """Other programs that are told the metrics; metrics.jsonl is always written."""

    @field_validator("trackers")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        if value:
            raise ValueError(f"no tracker is named {value[0]!r}; metrics.jsonl is always written, so leave this empty")
        return value


class Job(Section):
    """One training run, as a person describes it."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run lives in runs/NAME."""
    model: Model = Model()
    """What is trained."""
    data: Data = Data()
    """What it is trained on."""
    train: Train = Train()
    """The recipe."""
    optim: Optim = Optim()
    """The optimizer."""
    cluster: Cluster = Cluster()
    """The devices."""
    parallel: Parallel | Literal["auto"] = "auto"
    """The layout: auto, or the degree of each axis."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """What the matrices are multiplied in; weights and optimizer stay fp32. auto is bf16 on GPUs, fp32 on CPUs.
    fp8 is bf16 with the blocks' matrix products in fp8."""
    fp8: Fp8 = Fp8()
    """Scaling, with precision: fp8."""
    memory: Memory = Memory()
    """Recompute and offload."""
    comm: Comm = Comm()
    """Communication."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints."""
    resilience: Resilience = Resilience()
    """What is done about faults."""
    watch: Watch = Watch()
    """Progress and metrics."""
    runs_dir: str = "runs"
    """The folder that holds the runs."""
