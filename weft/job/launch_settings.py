"""The settings of `weft launch`, part of `cluster`; a target in weft/launch/targets lists those that it reads."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from weft.job.section import Section

TIME_LIMIT = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")


class SlurmOptions(Section):
    """Slurm: options of `sbatch` and `srun`."""

    array: str | None = Field(None, pattern=r"^[0-9,:%-]+$")
    """Job array such as 0-7%4: one run per task, named NAME-TASK, each with `array_set` applied."""
    array_set: list[str] = Field(default_factory=list)
    """Changes to the job of each array task, one line per task, such as "optim.lr=1e-3 train.seed=1"."""
    container: Literal["pyxis", "apptainer"] = "pyxis"
    """How `cluster.image` is run: srun --container-image (the pyxis plugin), or apptainer exec."""
    groups: list[str] = Field(default_factory=list)
    """Heterogeneous job: further groups of nodes, each as options of sbatch, such as "--nodes=2 --partition=b200"."""
    options: list[str] = Field(default_factory=list)
    """Further options of sbatch, such as --qos=high."""
    requeue: bool = True
    """Requeue the job when it was preempted or reaches its time limit (exit code 75)."""
    signal_s: int = Field(120, ge=5, le=86400)
    """Seconds before the time limit at which the run is asked to save and stop."""


class SshOptions(Section):
    """ssh: how hosts are reached."""

    options: list[str] = Field(default_factory=list)
    """Options of ssh, such as -F and ssh_config, or -p and 2222."""


class MpiOptions(Section):
    """MPI: how ranks are started."""

    command: str = "mpirun"
    """The launcher: mpirun, mpiexec or a path."""
    options: list[str] = Field(default_factory=list)
    """Further options of the launcher, such as --oversubscribe."""


class LaunchSettings(Section):
    """Where and how `weft launch` starts the run."""

    target: str | None = None
    """Where `weft launch` starts the run, if --on is not given: a target such as slurm, or an entry of
    ~/.config/weft/clusters.yaml."""
    account: str | None = None
    """Account or project that is charged."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the run."""
    gpu_type: str | None = None
    """The scheduler's name of the GPU type, as in --gres=gpu:h100:8."""
    hostfile: str | None = None
    """File with one host per line, such as `node1 slots=8`."""
    hosts: list[str] = Field(default_factory=list)
    """Hosts in the form of the lines of a hostfile."""
    image: str | None = None
    """Container image."""
    interface: str | None = None
    """Network interface between nodes, such as ib0 (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME)."""
    partition: str | None = None
    """Partition or queue."""
    python: str | None = None
    """Python interpreter on the nodes. Default: the one that runs `weft launch`; in an image, python3."""
    setup: list[str] = Field(default_factory=list)
    """Shell lines that are run on each node first, such as `module load cuda`."""
    time_limit: str | None = None
    """Time limit: minutes, HH:MM:SS or D-HH:MM:SS."""
    volumes: list[str] = Field(default_factory=list)
    """Folders mounted into the container, as SOURCE:PATH."""
    workdir: str | None = None
    """Folder in which the run starts on each node. Default: the current folder."""
    slurm: SlurmOptions = SlurmOptions()
    """Options of the target slurm."""
    ssh: SshOptions = SshOptions()
    """Options of the target ssh."""
    mpi: MpiOptions = MpiOptions()
    """Options of the target mpi."""

    @field_validator("time_limit", mode="before")
    @classmethod
    def _check_time_limit(cls, value: object) -> object:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(text, str) and not TIME_LIMIT.fullmatch(text):
            raise ValueError("must be minutes, HH:MM:SS or D-HH:MM:SS")
        return text

    @field_validator("environment", mode="before")
    @classmethod
    def _as_text_values(cls, value: object) -> object:
        """YAML reads 1 as a number."""
        if not isinstance(value, dict):
            return value
        return {k: str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for k, v in value.items()}

    @field_validator("environment")
    @classmethod
    def _check_names(cls, value: dict[str, str]) -> dict[str, str]:
        if wrong := [name for name in value if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]:
            raise ValueError(f"must have names of environment variables, not {wrong[0]!r}")
        return value

    @field_validator("volumes")
    @classmethod
    def _check_volumes(cls, value: list[str]) -> list[str]:
        if wrong := [text for text in value if not re.fullmatch(r"[^:]+:/[^:]*(:[a-z]+)?", text)]:
            raise ValueError(f"must be SOURCE:PATH with an absolute PATH in the container, not {wrong[0]!r}")
        return value
