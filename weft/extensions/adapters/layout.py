"""The ranks and the layout of a training loop of your own: the parts of a job that such a loop uses."""

from __future__ import annotations

import atexit
import datetime
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist

from weft.comm.teardown import leave
from weft.hardware.rank_environment import rank_info
from weft.job.errors import JobError
from weft.job.schema import Job, Parallel
from weft.mesh import Mesh, connect, local_device, mesh_of
from weft.planner.plan import Plan

AXES = ("dp_replicate", "dp_shard", "tp")
"""Axes that a loop of your own can have: every rank computes the whole loss of its samples."""

BUCKET_MB = 25.0


def plan_of(job: Job, world: int) -> Plan:
    """The plan of a loop of your own on so many ranks. `parallel: auto` replicates the model."""
    parallel = Parallel(dp_replicate=-1, dp_shard=1) if job.parallel == "auto" else job.parallel
    for axis in ("pp", "cp", "ep"):
        if getattr(parallel, axis) != 1:
            raise JobError(
                f"parallel.{axis}={getattr(parallel, axis)} needs a job (weft train): in a loop of your own, every "
                f"rank computes the whole loss; {', '.join(AXES)} would work"
            )
    degrees = {axis: getattr(parallel, axis) for axis in AXES}
    rest = [axis for axis, degree in degrees.items() if degree == -1]
    fixed = prod(degree for degree in degrees.values() if degree > 0)
    if len(rest) > 1:
        raise JobError(
            f"parallel.{rest[0]} and parallel.{rest[1]} are both -1; one axis may take the rest of the ranks"
        )
    if rest and world % fixed == 0:
        degrees[rest[0]] = world // fixed
    if prod(degrees.values()) != world:
        asked = " × ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        raise JobError(f"parallel asks for {asked}, but {world} ranks were started")
    cuda = torch.cuda.is_available() and job.cluster.device != "cpu"
    own_gpus = cuda and rank_info().local_world <= torch.cuda.device_count()
    backend = ("nccl" if own_gpus else "gloo") if job.comm.backend == "auto" else job.comm.backend
    wanted = precision_of(job, cuda)
    return replace(
        Plan("cuda" if cuda else "cpu", "", backend),
        nodes=max(1, world // rank_info().local_world), **degrees, zero=parallel.zero,
        precision=wanted if degrees["dp_shard"] > 1 else "fp32",  # replicas keep fp32 weights, and use autocast
        recompute="none" if job.memory.recompute == "auto" else job.memory.recompute,
        compile=job.train.compile is True, compression=job.comm.compression,
        bucket_mb=BUCKET_MB if job.comm.bucket_mb == "auto" else job.comm.bucket_mb, allreduce=job.comm.allreduce,
    )  # fmt: skip


def precision_of(job: Job, cuda: bool) -> str:
    """The precision of matrix products. A loop of your own has no fp8."""
    if job.precision == "fp8":
        raise JobError("precision=fp8 needs a job (weft train); bf16 would work in a loop of your own")
    if job.precision != "auto":
        return job.precision
    return "bf16" if cuda else "fp32"


def join_ranks(job: Job) -> tuple[Plan, Mesh]:
    """Join the ranks that torchrun, Weft or MPI started, in a process group that may exist already."""
    plan = plan_of(job, rank_info().world)
    if plan.world > 1 and dist.is_initialized():
        timeout = datetime.timedelta(seconds=job.comm.timeout_s)
        return plan, mesh_of(plan, local_device(plan, rank_info().local_rank), timeout)
    if job.comm.encrypt and plan.nodes > 1:
        raise JobError("comm.encrypt=true on several nodes needs a job (weft train); comm.encrypt=false would work")
    mesh = connect(plan, job.comm.timeout_s)
    if plan.world > 1 and plan.backend == "gloo":
        atexit.register(leave)  # a script does not end its groups, and those of Gloo have threads
    return plan, mesh
