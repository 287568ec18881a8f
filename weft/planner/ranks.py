"""The device of a job, its number of ranks and its communication backend."""

from __future__ import annotations

import os
from dataclasses import replace
from math import gcd

from weft.hardware.catalog import Device, device_by_product, find_device
from weft.hardware.probe import Machine, probe
from weft.hardware.rank_environment import launcher_backend
from weft.hardware.shared_devices import memory_fraction, ranks_per_device
from weft.job.comm import BACKENDS
from weft.job.errors import JobError, MachineError
from weft.job.schema import Job
from weft.planner.plan import AXES, Plan

MAX_CPU_RANKS = 4
"""Default limit on CPU ranks, unless the job or --nproc sets another; their threads share all cores."""
DEVICES_PER_NODE = 8
"""Devices on a node where a job names a catalog device but not cluster.devices_per_node."""


def device_memory(job: Job, device: Device, machine: Machine, world: int) -> float:
    """GiB of memory per rank that a job may use: memory.device_gib, if the device has as much."""
    has = _device_memory(job, device, machine, world)
    return min(has, job.memory.device_gib) if job.memory.device_gib else has


def _device_memory(job: Job, device: Device, machine: Machine, world: int) -> float:
    """GiB of memory per rank: from the job, else the catalog; CPU ranks share this machine's memory."""
    if job.cluster.memory_gib:
        return job.cluster.memory_gib
    if device.kind == "cpu":
        return machine.memory_gib * job.cluster.nodes / world
    sharing = ranks_per_device(world, len(machine.gpus)) if shares_devices(job, machine, world) else 1
    return device.memory_gib * (memory_fraction(sharing) if sharing > 1 else 1.0)


def shares_devices(job: Job, machine: Machine, world: int) -> bool:
    """Whether there are more ranks on this machine than GPUs."""
    here = job.cluster.device in ("auto", "cuda") and job.cluster.nodes == 1
    return here and 0 < len(machine.gpus) < world


def device_for(job: Job, machine: Machine) -> Device:
    """The device a job names, or what this machine has."""
    name = job.cluster.device
    if name in ("auto", "cuda"):
        if machine.gpus:
            return device_by_product(machine.gpus[0].name) or replace(
                find_device("cpu"), name=machine.gpus[0].name, kind="cuda", memory_gib=machine.gpus[0].memory_gib
            )
        if name == "auto":
            return find_device("cpu")
        raise MachineError("cluster.device=cuda, but this machine has no NVIDIA GPU; use cluster.device=cpu or auto")
    return find_device(name, job.cluster.catalog)


def device_of(job: Job, plan: Plan) -> Device:
    """A plan's device: the catalog's, or this machine's where the catalog lacks it."""
    try:
        return find_device(plan.device_name, job.cluster.catalog)
    except JobError:
        here = device_for(job, probe())
        if here.name != plan.device_name:
            raise
        return here


def with_nodes(job: Job, given: int | None) -> Job:
    """The job with as many nodes as the given ranks need, on a remote cluster."""
    cluster = job.cluster
    if given is None or cluster.device in ("auto", "cpu", "cuda"):
        return job
    per_node = DEVICES_PER_NODE if cluster.devices_per_node == "auto" else cluster.devices_per_node
    nodes = -(-given // per_node)
    if nodes == cluster.nodes:
        return job
    return job.model_copy(update={"cluster": cluster.model_copy(update={"nodes": nodes})})


def world_of(job: Job, machine: Machine, device: Device, given: int | None) -> tuple[int, list[str]]:
    """The number of ranks: those already started, else the cluster's, else what this machine supports."""
    if given is not None:
        return given, []
    per_node = job.cluster.devices_per_node
    if per_node != "auto":
        return job.cluster.nodes * per_node, []
    pinned, open_axis = 1, True
    if job.parallel != "auto":
        degrees = [getattr(job.parallel, axis) for axis in AXES]
        open_axis = -1 in degrees
        for degree in degrees:
            pinned *= max(1, degree)
    if device.kind != "cpu":
        if job.cluster.share_devices and not open_axis:
            return pinned, []
        count = len(machine.gpus) if job.cluster.device in ("auto", "cuda") else DEVICES_PER_NODE
        return job.cluster.nodes * (count or 1), []
    if not open_axis:
        return pinned, []
    ranks = max(pinned, min(machine.cores_physical, MAX_CPU_RANKS) // pinned * pinned)
    while ranks > pinned and gcd(*job.train.ramp.sizes) % (ranks // pinned):
        ranks -= pinned
    return ranks, [f"{ranks} ranks on this machine's {machine.cores_physical} cores (--nproc sets another number)"]


def backend_of(job: Job, machine: Machine, kind: str, world: int) -> str:
    if job.comm.backend != "auto":
        carried = kind in BACKENDS[job.comm.backend].devices
        if not carried and kind == "cpu":
            raise JobError(f"comm.backend={job.comm.backend} needs GPUs, and the ranks compute on CPUs; "
                           "gloo would work")  # fmt: skip
        if not carried:
            raise JobError(f"comm.backend={job.comm.backend} carries tensors in host memory alone, and the ranks "
                           "compute on GPUs; nccl would work, under mpirun too")  # fmt: skip
        if job.comm.backend == "nccl" and shares_devices(job, machine, world) and not job.cluster.share_devices:
            raise JobError(f"comm.backend=nccl: {world} ranks on {len(machine.gpus)} GPU need "
                           "cluster.share_devices=true, which is for tests and not for speed")  # fmt: skip
        return job.comm.backend
    if kind == "cpu":
        launched = launcher_backend()
        return launched if launched and launched in BACKENDS and "WEFT_STORE" not in os.environ else "gloo"
    return "gloo" if shares_devices(job, machine, world) and not job.cluster.share_devices else "nccl"
