"""`comm`: communication."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from weft.job.compression import parse_compression
from weft.job.section import Section


class Comm(Section):
    """How ranks talk."""

    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    """auto is nccl where each rank has its own GPU, mpi on CPUs where mpirun started the ranks, gloo elsewhere."""
    allreduce: Literal["auto", "native", "ring", "tree", "hierarchical"] = "auto"
    """How replicas sum their gradients: by the backend's own all-reduce (native, which auto is), or by messages around
    a ring, up and down a tree, or inside each node first and then between nodes (hierarchical)."""
    compression: str = "none"
    """What gradients travel as between data-parallel ranks: as they are (none), rounded (fp16, bf16, int8, int4), the
    largest of them (topk:0.01, that share; threshold:3, those above so many times their root mean square), as matrices
    of a low rank (powersgd:4), as signs (onebit), or as the link asks (adaptive). Weights that dp_shard gathers travel
    in fp16, bf16 or int8 then."""
    compression_warmup: int | Literal["auto"] = "auto"
    """Steps at the beginning in which topk, threshold, powersgd and onebit travel as int8, while gradients still turn
    quickly. From then on less and less is sent: topk and threshold start from a sixth of the numbers, powersgd from
    four times its rank, onebit from int4. auto is 300, or three fifths of a shorter run, or a quarter of a longer one,
    at most 2000; 0 compresses as much as asked for from the first step. adaptive goes no further than int4 until
    then."""
    bucket_mb: float | Literal["auto"] = "auto"
    """Gradients of replicas are summed in buckets of this size, while the backward pass goes on. auto weighs what a
    message costs against what a byte does."""
    timeout_s: float = Field(600.0, gt=0)
    """A collective that takes longer ends the run and names the ranks that did not arrive."""

    @field_validator("compression_warmup")
    @classmethod
    def _steps(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("must be a number of steps from 0 up, or auto")
        return value

    @field_validator("compression")
    @classmethod
    def _known(cls, value: str) -> str:
        return str(parse_compression(value))

    @field_validator("bucket_mb")
    @classmethod
    def _size(cls, value: float | str) -> float | str:
        if isinstance(value, float) and value <= 0:
            raise ValueError("must be more than 0, or auto")
        return value
