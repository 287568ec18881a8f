"""`comm`: communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from weft.job.compression import parse_compression
from weft.job.registry import NameIn, Registry
from weft.job.section import Section, limits


@dataclass(frozen=True)
class Backend:
    """A communication backend. Functions are named as `module:function`."""

    name: str
    torch_name: str
    """Its name in torch, with the device types of several."""
    devices: tuple[str, ...]
    """Kinds of devices whose tensors it carries."""
    host: str
    """torch's name of the backend that carries small values in host memory between steps."""
    other: str = "gloo"
    """The backend that a refusal names instead."""
    encrypts: bool = False
    """Whether comm.encrypt works with it."""
    launcher: str = ""
    """The command that has to start its ranks; empty if any may."""
    register: str = ""
    """Registers it with torch, once per process."""
    meet: str = ""
    """Gives the store at which ranks of its launcher meet, from the timeout."""


BACKENDS: Registry[Backend] = Registry("comm.backend", __name__)
BACKENDS.register(Backend("gloo", "gloo", ("cpu", "cuda"), "gloo", encrypts=True))
BACKENDS.register(Backend("nccl", "cpu:gloo,cuda:nccl", ("cuda",), "gloo"))


class Comm(Section):
    """How ranks communicate."""

    backend: Literal["auto"] | Annotated[str, NameIn(BACKENDS)] = "auto"
    """auto is nccl if each rank has its own GPU, mpi on CPUs if mpirun started the ranks, and gloo otherwise."""
    allreduce: Literal["auto", "native", "ring", "tree", "hierarchical"] = "auto"
    """Algorithm of the gradient all-reduce between replicas: the backend's own (native, the same as auto), ring, tree,
    or hierarchical (first inside each node, then between nodes). They work with compression fp16, bf16, int8, int4 and
    onebit, which then encode every message."""
    compression: str = "none"
    """Gradient compression between data-parallel ranks: none, rounding (fp16, bf16, int8, int4), the largest elements
    (topk:0.01 sends this fraction, threshold:3 those above this multiple of their root mean square), low-rank matrices
    (powersgd:4), signs (onebit), or a choice by the measured bandwidth (adaptive). The weights that dp_shard gathers
    are then sent in fp16, bf16 or int8."""
    compression_warmup: int | Literal["auto"] = "auto"
    """Steps at the start in which topk, threshold, powersgd and onebit send int8, because gradients change quickly
    there. After them compression is ramped up gradually: topk and threshold start from a sixth of the elements,
    powersgd from four times its rank, onebit from int4. auto is 300 steps, or three fifths of a shorter run, or a
    quarter of a longer one, at most 2000; 0 uses full compression from the first step. adaptive uses at most int4
    during the warm-up."""
    bucket_mb: float | Literal["auto"] = "auto"
    """Bucket size of the gradient all-reduce, which overlaps with the backward pass. auto chooses it from the latency
    and bandwidth of the link."""
    encrypt: bool = False
    """Encrypt everything that ranks on several nodes, their supervisors, parameter servers and federated clients send
    (TLS 1.3, one certificate a run). Refused with nccl and mpi, which cannot encrypt."""
    timeout_s: float = Field(600.0, gt=0)
    """Timeout of a collective. When it expires, the run ends with the ranks that did not arrive."""

    _check_warmup = limits(
        "compression_warmup", valid=lambda steps: steps >= 0, must="a number of steps from 0 up, or auto"
    )
    _check_bucket = limits("bucket_mb", valid=lambda size: size > 0, must="more than 0, or auto")

    @field_validator("compression")
    @classmethod
    def _known(cls, value: str) -> str:
        return str(parse_compression(value))
