"""Who this process is among the ranks: as torchrun, Weft's launcher or an MPI starter says through the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Starter:
    """The variables in which a starter says who a process is."""

    name: str
    rank: str
    world: str
    local_rank: str
    local_world: str
    least: int = 1
    """A world of fewer is none: srun also marks shells that hold no MPI program at all."""


TORCHRUN = Starter("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Weft's own launcher writes the same ones."""

MPI_STARTERS: tuple[Starter, ...] = (
    Starter("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Starter("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE"),
    Starter("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", least=2),
)  # fmt: skip


@dataclass(frozen=True)
class Standing:
    """One process's place."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    started_by: str
    """The starter's name; alone, where nobody said anything."""

    @property
    def joined(self) -> bool:
        """Whether somebody started a world that this process is to join."""
        return self.started_by != "alone"


def standing(environ: Mapping[str, str] = os.environ) -> Standing:
    """This process's place; torchrun's variables count before MPI's, which a program under mpirun may set by hand."""
    for starter in (TORCHRUN, *MPI_STARTERS):
        if _said(starter, environ):
            rank, world = int(environ[starter.rank]), int(environ[starter.world])
            local_world = int(environ.get(starter.local_world, world))
            return Standing(
                rank, world, int(environ.get(starter.local_rank, rank % local_world)), local_world, starter.name
            )
    return Standing(0, 1, 0, 1, "alone")


def under_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an MPI starter started this process."""
    return any(_said(starter, environ) for starter in MPI_STARTERS)


def _said(starter: Starter, environ: Mapping[str, str]) -> bool:
    return starter.rank in environ and int(environ.get(starter.world, 0)) >= starter.least


def adopt(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Say in torchrun's variables what an MPI starter said in its own. Returns whether there is a world to join."""
    found = standing(environ)
    if not found.joined:
        return False
    for key, value in (
        (TORCHRUN.rank, found.rank), (TORCHRUN.world, found.world), (TORCHRUN.local_rank, found.local_rank),
        (TORCHRUN.local_world, found.local_world),
    ):  # fmt: skip
        environ.setdefault(key, str(value))
    return True
