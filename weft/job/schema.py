"""A Job, assembled from its sections. The text under each field is its help; `weft schema` prints it as JSON Schema."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from weft.job.checkpoint import Checkpoint
from weft.job.cluster import Cluster, DeviceGroup, Failures, TopologyLevel
from weft.job.comm import Comm
from weft.job.data import Data
from weft.job.fp8 import Fp8
from weft.job.memory import Memory
from weft.job.model import Experts, Model, RopeScaling
from weft.job.optim import Optim
from weft.job.parallel import Parallel
from weft.job.resilience import Resilience
from weft.job.section import Section
from weft.job.sync import Sync
from weft.job.train import Train
from weft.job.watch import Watch

__all__ = [
    "Checkpoint",
    "Cluster",
    "Comm",
    "Data",
    "DeviceGroup",
    "Experts",
    "Failures",
    "Fp8",
    "Job",
    "Memory",
    "Model",
    "Optim",
    "Parallel",
    "Resilience",
    "RopeScaling",
    "Section",
    "Sync",
    "TopologyLevel",
    "Train",
    "Watch",
]  # fmt: skip


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
