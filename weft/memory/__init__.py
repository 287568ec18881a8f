"""Activation memory: recompute, chunks of long sequences, offload to host memory, and a tensor tracer."""

from weft.memory.chunked_block import run_in_chunks
from weft.memory.host_offload import HostOffload
from weft.memory.recompute import recompute, recomputed_units

__all__ = ["HostOffload", "recompute", "recomputed_units", "run_in_chunks"]
