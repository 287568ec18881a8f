"""The rank of this process, from the environment variables of torchrun, Weft's launcher or an MPI launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass


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
    for launcher in (TORCHRUN, *MPI_LAUNCHERS):
        if _is_set(launcher, environ):
            rank, world = int(environ[launcher.rank]), int(environ[launcher.world])
            local_world = int(environ.get(launcher.local_world, world))
            return RankInfo(
                rank, world, int(environ.get(launcher.local_rank, rank % local_world)), local_world, launcher.name
            )
    return RankInfo(0, 1, 0, 1, "alone")


def under_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an MPI launcher started this process."""
    return any(_is_set(launcher, environ) for launcher in MPI_LAUNCHERS)


def _is_set(launcher: LauncherVariables, environ: Mapping[str, str]) -> bool:
    return launcher.rank in environ and int(environ.get(launcher.world, 0)) >= launcher.min_world


def export_torchrun_variables(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Set torchrun's variables from those of an MPI launcher. Returns whether there is a world to join."""
    found = rank_info(environ)
    if not found.joined:
        return False
    for key, value in (
        (TORCHRUN.rank, found.rank), (TORCHRUN.world, found.world), (TORCHRUN.local_rank, found.local_rank),
        (TORCHRUN.local_world, found.local_world),
    ):  # fmt: skip
        environ.setdefault(key, str(value))
    return True
