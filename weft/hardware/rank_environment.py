"""The rank or node of this process, from the environment variables of torchrun, MPI launchers and schedulers."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from weft.hardware.network import own_address
from weft.job.errors import MachineError

FIRST_PORT, PORTS = 20_000, 10_000
"""Ports of rendezvous under schedulers, chosen by the number of the step."""

MAX_WORLD = 10**7


@dataclass(frozen=True)
class LauncherVariables:
    """Environment variables that a launcher sets for each rank."""

    name: str
    rank: str
    world: str
    local_rank: str
    local_world: str
    min_world: int = 1
    """Smaller worlds are ignored: srun also sets the variables for processes that are not MPI programs."""


TORCHRUN = LauncherVariables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Weft's own launcher sets the same variables."""

MPI_LAUNCHERS: tuple[LauncherVariables, ...] = (
    LauncherVariables("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE"),
    LauncherVariables("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE"),
    LauncherVariables("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", min_world=2),
)  # fmt: skip


SLURM = LauncherVariables("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", min_world=2)
"""srun sets them for the tasks of a step; SLURM_STEP_NUM_TASKS is not set in a batch script."""

SCHEDULERS: tuple[LauncherVariables, ...] = (
    SLURM,
    LauncherVariables("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", min_world=2),
    LauncherVariables("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
            "JSM_NAMESPACE_LOCAL_SIZE", min_world=2),
)  # fmt: skip
"""Launchers of schedulers; LSF starts ranks by jsrun or by mpirun."""


@dataclass(frozen=True)
class RankInfo:
    """Rank and world size of a process."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    started_by: str
    """Name of the launcher, or `alone`."""

    @property
    def joined(self) -> bool:
        """Whether a launcher started this process as a rank of a world."""
        return self.started_by != "alone"


def rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Rank information of this process; torchrun's variables take precedence over MPI's."""
    for launcher in (TORCHRUN, *MPI_LAUNCHERS, *SCHEDULERS):
        if _is_set(launcher, environ):
            world = whole_number(environ, launcher.world, 1, MAX_WORLD)
            rank = whole_number(environ, launcher.rank, 0, world - 1)
            local_world = whole_number(environ, launcher.local_world, 0, world) or world // _step_nodes(environ) or 1
            local_rank = whole_number(environ, launcher.local_rank, 0, world - 1, rank % local_world)
            return RankInfo(rank, world, local_rank, local_world, launcher.name)
    return RankInfo(0, 1, 0, 1, "alone")


@dataclass(frozen=True)
class NodeInfo:
    """Number of this node and of all nodes, where a scheduler starts one process a node."""

    node: int
    count: int
    master: str
    """Name or address of a node of the run, which gives the route to the others."""


def node_info(environ: Mapping[str, str] = os.environ) -> NodeInfo | None:
    """The node of this process in a Slurm step of one task a node; None elsewhere.

    The master is the first node if its name can be resolved, else the machine that runs srun.
    """
    if TORCHRUN.rank in environ or not _is_set(SLURM, environ):
        return None
    count = whole_number(environ, SLURM.world, 1, MAX_WORLD)
    if _step_nodes(environ) != count:
        return None
    return NodeInfo(whole_number(environ, SLURM.rank, 0, count - 1), count, slurm_master(environ))


def slurm_master(environ: Mapping[str, str] = os.environ) -> str:
    """Address of the first node of a Slurm step, or of the machine that runs srun."""
    names = expand_nodes(environ.get("SLURM_STEP_NODELIST", ""))
    try:
        return str(socket.getaddrinfo(names[0], 9, socket.AF_INET)[0][4][0])
    except (OSError, IndexError):
        found = environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
        return own_address() if found.startswith("127.") else found  # then all nodes are on this machine


def expand_nodes(text: str) -> list[str]:
    """The names of a Slurm node list such as `a[01-03,7],b2`."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^]]*\])+", text):
        found = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^]]*)\]", part):
            ends = [plain] if plain else [n for piece in ranges.split(",") for n in _numbers(piece)]
            found = [name + end for name in found for end in ends]
        names += found
    return names


def _numbers(piece: str) -> list[str]:
    first, sign, last = piece.partition("-")
    return [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)] if sign else [first]


def _step_nodes(environ: Mapping[str, str]) -> int:
    return whole_number(environ, "SLURM_STEP_NUM_NODES", 1, MAX_WORLD, 1) if _is_set(SLURM, environ) else 1


def launcher_backend(environ: Mapping[str, str] = os.environ) -> str:
    """The backend of the launcher that started this process: mpi of those of MPI, else an empty string."""
    return "mpi" if any(_is_set(launcher, environ) for launcher in MPI_LAUNCHERS) else ""


def _is_set(launcher: LauncherVariables, environ: Mapping[str, str]) -> bool:
    return launcher.rank in environ and whole_number(environ, launcher.world, 0, MAX_WORLD) >= launcher.min_world


def whole_number(environ: Mapping[str, str], name: str, lowest: int, highest: int, default: int = 0) -> int:
    """The number in a variable of a launcher, or the default; a MachineError if it holds something else."""
    text = environ.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"[0-9]{1,18}", text) or not lowest <= int(text) <= highest:
        raise MachineError(
            f"the environment has {name}={text[:40]!r}, which must be a whole number from {lowest} to {highest}; "
            "launchers such as torchrun and srun set it"
        )
    return int(text)


def export_torchrun_variables(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Set torchrun's variables from those of another launcher. Returns whether there is a world to join."""
    found = rank_info(environ)
    if not found.joined:
        return False
    for key, value in (
        (TORCHRUN.rank, found.rank), (TORCHRUN.world, found.world), (TORCHRUN.local_rank, found.local_rank),
        (TORCHRUN.local_world, found.local_world),
    ):  # fmt: skip
        environ.setdefault(key, str(value))
    if found.started_by == SLURM.name and "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = slurm_master(environ)
        job, step = (whole_number(environ, name, 0, 2**40) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        step += 16 * job
        environ.setdefault("MASTER_PORT", str(FIRST_PORT + step % PORTS))
    return True
