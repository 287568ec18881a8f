"""Collectives along an axis of the mesh, with counters, and their autograd forms."""

from weft.comm.autograd import copy_in, gather_along, join_along, reduce_out, scatter_along, split_along, sum_up
from weft.comm.axis import Axis, Pending
from weft.comm.meter import Meter

__all__ = [
    "Axis", "Meter", "Pending", "copy_in", "gather_along", "join_along", "reduce_out", "scatter_along", "split_along",
    "sum_up",
]  # fmt: skip
