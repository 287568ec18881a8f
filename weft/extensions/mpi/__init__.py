"""Runs whose ranks an MPI launcher starts, and their collectives over mpi4py.

Registers the target `mpi` of `weft launch` and the backend `mpi`.
"""

from weft.comm.backends import BACKENDS, BackendKind
from weft.launch.targets.target_kinds import LAUNCH_TARGETS, TargetKind

PACKAGE = __name__

LAUNCH_TARGETS.register(TargetKind("mpi", f"{PACKAGE}.mpi_target:MpiTarget"))
BACKENDS.register(BackendKind("mpi", "mpi4py", "mpi4py", f"{PACKAGE}.backend:register", f"{PACKAGE}.backend:meet"))
