"""The settings of `weft launch`, part of `cluster`, and `queue`: what a run claims of a machine that users share."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from weft.job.errors import JobError
from weft.job.launch.when_rule import Rule, parse_rule
from weft.job.section import Section, limits

TIME_LIMIT = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")


class SlurmGroup(Section):
    """Nodes of a heterogeneous Slurm job with options of their own."""

    nodes: int = Field(1, ge=1, le=10**6)
    """Number of these nodes; they are part of `cluster.nodes`."""
    options: list[str] = Field(default_factory=list)
    """Their options of sbatch, such as --partition=b200."""


class SlurmOptions(Section):
    """Slurm: options of `sbatch` and `srun`."""

    array: list[str] = Field(default_factory=list)
    """A job array with one run for each entry, named NAME-0, NAME-1 …: an entry holds changes to the job, such as
    "optim.lr=1e-3 train.seed=1"."""
    array_limit: int | None = Field(None, ge=1)
    """Runs of the array at the same time."""
    container: Literal["pyxis", "apptainer"] = "pyxis"
    """How `cluster.image` is run: by srun --container-image (the pyxis plugin), or by apptainer exec."""
    cpus_per_node: int | None = Field(None, ge=1, le=4096)
    """Cores of a node (--cpus-per-task). Default: one for each CPU rank, 8 for each GPU."""
    groups: list[SlurmGroup] = Field(default_factory=list)
    """A heterogeneous job: further groups of nodes with options of their own."""
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


class KubernetesOptions(Section):
    """Kubernetes: the workload and its pods, one for each node."""

    kind: Literal["job", "jobset", "trainjob", "pytorchjob"] = "job"
    """The workload: an Indexed Job with a headless service (needs no operator), a JobSet, or a TrainJob or PyTorchJob
    of Kubeflow."""
    context: str | None = None
    """Context of the kubeconfig. Default: the current one."""
    cpu: str | None = None
    """Cores that a pod requests. Default: one for each rank."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource name of the GPUs."""
    grace_s: int = Field(120, ge=1, le=86400)
    """Seconds that a pod has to save and stop."""
    keep_s: int = Field(86400, ge=0, le=10**8)
    """Seconds for which a finished workload is kept."""
    memory: str | None = None
    """Memory of a pod, such as 64Gi."""
    namespace: str | None = None
    """Namespace. Default: the context's."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that the nodes must have."""
    priority_class: str | None = None
    """PriorityClass of the pods."""
    env_secrets: list[str] = Field(default_factory=list)
    """Secrets whose keys become variables of the pods, such as the credentials of the store in checkpoint.to."""
    pull_secrets: list[str] = Field(default_factory=list)
    """Secrets with which the image is pulled."""
    queue: str | None = None
    """Local queue of Kueue."""
    queue_priority: str | None = None
    """WorkloadPriorityClass of Kueue."""
    resources: dict[str, int] = Field(default_factory=dict)
    """Further resources of a pod, such as {rdma/hca_shared_devices_a: 1}."""
    retries: int = Field(20, ge=0, le=10**6)
    """Failures of a node after which the run fails. Preemptions do not count."""
    run_as_user: int = Field(1000, ge=1, le=2**31)
    """User and group id of the processes."""
    shm_gib: float | None = Field(None, gt=0)
    """Size of /dev/shm. Default: 2 GiB for each rank."""
    tolerations: list[str] = Field(default_factory=list)
    """Taints that the pods tolerate, as KEY[=VALUE][:EFFECT]. nvidia.com/gpu is always among them for GPUs."""


class RayOptions(Section):
    """Ray: the cluster."""

    address: str | None = None
    """Address of the job server. Default: RAY_API_SERVER_ADDRESS, or http://127.0.0.1:8265."""


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
    kubernetes: KubernetesOptions = KubernetesOptions()
    """Options of the target kubernetes."""
    ray: RayOptions = RayOptions()
    """Options of the target ray."""
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


class LaunchPolicy(Section):
    """When `weft launch` runs the job: it waits, stops the run with a checkpoint, and starts it again, by a rule."""

    when: str | None = None
    """Conditions on prices and local time, such as spot < 2 USD/h, 22:00-06:00, mon-fri 18:00-08:00 or sat-sun, joined
    by `and` and `or`; @FILE reads them from a file, one alternative a line. Default: always."""
    prices: dict[str, str] = Field(default_factory=dict)
    """For each name in `when`, a file, or a command whose output begins with the number: {spot: ./spot_price.sh}."""
    check_s: float = Field(60.0, gt=0, le=86_400)
    """Seconds between checks of the rule."""

    @field_validator("when")
    @classmethod
    def _rule(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("@"):
            parse_rule(value)
        return value

    @model_validator(mode="after")
    def _valid(self) -> LaunchPolicy:
        if self.when is not None and not self.when.startswith("@"):
            self.check_names(parse_rule(self.when))
        return self

    def check_names(self, rule: Rule) -> None:
        """Refuse a rule with a price that has no source."""
        if missing := sorted(rule.names - set(self.prices)):
            name = missing[0]
            raise JobError(
                f"launch.when compares {name}, and launch.prices has no {name}; add a file or a command that prints "
                f"it, as in 'launch.prices={{{name}: ./{name}_price.sh}}'"
            )


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
