"""Activation memory: recompute, storage in fp8, chunks of long sequences, host memory, and a tensor tracer."""

from weft.memory.chunked_block import run_in_chunks
from weft.memory.fp8_activations import Fp8Codec, Fp8HostOffload, save_as_fp8
from weft.memory.host_offload import HostOffload
from weft.memory.recompute import recompute, recomputed_units

__all__ = [
    "Fp8Codec", "Fp8HostOffload", "HostOffload", "recompute", "recomputed_units", "run_in_chunks", "save_as_fp8",
]  # fmt: skip
