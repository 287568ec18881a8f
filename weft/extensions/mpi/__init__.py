"""Runs whose ranks an MPI launcher starts, and their communication over MPI.

Registers the target `mpi` of `weft launch` and the backend `mpi` of `comm.backend`.
"""

from weft.job.comm import BACKENDS, Backend
from weft.launch.targets.target_kinds import LAUNCH_TARGETS, TargetKind

LAUNCH_TARGETS.register(TargetKind("mpi", "weft.extensions.mpi.mpi_target:MpiTarget"))
BACKENDS.register(
    Backend(
        "mpi", "mpi4py", ("cpu",), "mpi4py", launcher="mpirun", register="weft.extensions.mpi.backend:register",
        meet="weft.extensions.mpi.backend:meet",
    )
)  # fmt: skip
