"""Runs whose ranks an MPI launcher starts.

Registers the target `mpi` of `weft launch`.
"""

from weft.launch.targets.target_kinds import LAUNCH_TARGETS, TargetKind

LAUNCH_TARGETS.register(TargetKind("mpi", "weft.extensions.mpi.mpi_target:MpiTarget"))
