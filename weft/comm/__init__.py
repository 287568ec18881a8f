"""Collectives along one axis of the mesh, counted, and their autograd forms."""

from weft.comm.autograd import copy_in, gather_along, join_along, reduce_out, scatter_along, split_along, sum_up
from weft.comm.axis import Axis, Waits
from weft.comm.wait_counters import Meter

__all__ = [
    "Axis", "Meter", "Waits", "copy_in", "gather_along", "join_along", "reduce_out", "scatter_along", "split_along",
    "sum_up",
]  # fmt: skip
