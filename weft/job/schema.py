"""The Job and its sections. The docstring of a field is its help; `weft schema` prints all of them as JSON Schema."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.job.checkpoint import Checkpoint
from weft.job.cluster import Cluster, DeviceGroup, Failures, TopologyLevel
from weft.job.comm import Comm
from weft.job.data import Data
from weft.job.extensions import MODULE_NAME
from weft.job.files.run_name import MAX_NAME_BYTES, NAME_PATTERN
from weft.job.launch.launch_settings import (
    KubernetesOptions,
    LaunchPolicy,
    MpiOptions,
    Queue,
    RayOptions,
    SlurmOptions,
    SshOptions,
)
from weft.job.memory import Memory
from weft.job.model import Model
from weft.job.model_parts.attention_settings import Latent, RopeScaling
from weft.job.model_parts.expert_settings import Experts
from weft.job.model_parts.fp8_settings import Fp8
from weft.job.model_parts.table_settings import EmbeddingTable, TableOptim
from weft.job.model_parts.tower_settings import TowerShape
from weft.job.optim import Optim
from weft.job.parallel import Parallel
from weft.job.resilience import Resilience
from weft.job.section import Section
from weft.job.sync import Sync
from weft.job.train import Train
from weft.job.watch import TracedSteps, Watch

__all__ = [
    "Checkpoint",
    "Cluster",
    "Comm",
    "Data",
    "DeviceGroup",
    "EmbeddingTable",
    "Experts",
    "Failures",
    "Fp8",
    "Job",
    "KubernetesOptions",
    "Latent",
    "LaunchPolicy",
    "Memory",
    "Model",
    "MpiOptions",
    "Optim",
    "Parallel",
    "Queue",
    "RayOptions",
    "Resilience",
    "RopeScaling",
    "Section",
    "SlurmOptions",
    "SshOptions",
    "Sync",
    "TableOptim",
    "TopologyLevel",
    "TowerShape",
    "TracedSteps",
    "Train",
    "Watch",
]  # fmt: skip


class Job(Section):
    """The description of one training run."""

    name: str = Field("run", pattern=NAME_PATTERN, max_length=MAX_NAME_BYTES)
    """Name of the run; its files are in runs/NAME."""
    model: Model = Model()
    """The model."""
    data: Data = Data()
    """The training data."""
    train: Train = Train()
    """Steps, batch size and evaluation."""
    optim: Optim = Optim()
    """The optimizer and learning rate."""
    cluster: Cluster = Cluster()
    """The devices."""
    parallel: Parallel | Literal["auto"] = "auto"
    """The parallel layout: auto, or the degree of each axis."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Data type of matrix products; master weights and optimizer state are fp32. auto is bf16 on GPUs, fp16 on
    GPUs without bf16 products (V100, T4), and fp32 on CPUs. fp8 is bf16 with the matrix products of the blocks in
    fp8."""
    fp8: Fp8 = Fp8()
    """Scaling and scope of precision: fp8."""
    memory: Memory = Memory()
    """Recompute, offload and chunks."""
    comm: Comm = Comm()
    """Communication."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints."""
    resilience: Resilience = Resilience()
    """Fault detection and recovery."""
    watch: Watch = Watch()
    """Progress and metrics."""
    launch: LaunchPolicy = LaunchPolicy()
    """When `weft launch` runs the job."""
    queue: Queue = Queue()
    """Claims on a machine that several users share."""
    runs_dir: str = "runs"
    """Folder of all runs, on a disk; checkpoint.to writes checkpoints to an object store."""
    extensions: tuple[str, ...] = ()
    """Modules, such as my_package.lion, that register optimizers, schedules, compressors or model families of your own.
    They are imported before the rest of a job file is read, by every rank too."""

    @field_validator("name")
    @classmethod
    def _short_name(cls, value: str) -> str:
        if (size := len(value.encode())) > MAX_NAME_BYTES:
            raise ValueError(f"must be of at most {MAX_NAME_BYTES} bytes in UTF-8, and this has {size}")
        return value

    @field_validator("runs_dir")
    @classmethod
    def _local(cls, value: str) -> str:
        if "://" in value:
            raise ValueError(f"must be a folder on a disk, not {value}; checkpoint.to={value} writes checkpoints there")
        return value

    @field_validator("extensions")
    @classmethod
    def _modules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [name for name in value if not MODULE_NAME.fullmatch(name)]:
            raise ValueError(f"must be names of Python modules such as my_package.lion, not {wrong[0]!r}")
        return value


Section.job_type = Job
