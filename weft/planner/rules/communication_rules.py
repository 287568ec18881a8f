"""Rules of communication: all-reduce, compression and backends."""

from __future__ import annotations

from weft.hardware.rank_environment import launcher_backend, rank_info
from weft.job.comm import BACKENDS
from weft.job.compression import parse_compression
from weft.job.schema import Job
from weft.planner.plan import Plan


def sums_by_messages(compression: str) -> bool:
    """Whether a compression can be summed by ring, tree or two levels: all but lists, low ranks and adaptive."""
    entry = parse_compression(compression).entry
    return entry.share is None and not entry.low_rank and not entry.adaptive


def allreduce_rule(job: Job, plan: Plan) -> str | None:
    """comm.allreduce applies to gradients of replicas that are sent in full or rounded."""
    if job.comm.allreduce in ("auto", "native"):
        return None
    if not sums_by_messages(job.comm.compression):
        return (
            f"comm.allreduce={job.comm.allreduce} adds up gradients from rank to rank, and "
            f"comm.compression={job.comm.compression} does not send every number in each message; "
            "allreduce=auto or compression=int8 would work"
        )
    if plan.dp_shard == 1:
        return None
    return (
        f"comm.allreduce={job.comm.allreduce} is how replicas sum their gradients, and under "
        f"parallel.dp_shard={plan.dp_shard} the backend sums them; allreduce=auto or dp_replicate would work"
    )


def compressed_experts_rule(job: Job, plan: Plan) -> str | None:
    """Compression does not support expert parallelism."""
    if job.comm.compression == "none" or plan.ep == 1:
        return None
    return (
        f"comm.compression={job.comm.compression} acts on gradients that all data-parallel ranks sum, and "
        f"parallel.ep={plan.ep} gives each rank experts of its own; compression=none or ep=1 would work"
    )


def encryption_rule(job: Job, plan: Plan) -> str | None:
    """Only Gloo and Weft's own messages can be encrypted."""
    here = rank_info()
    one_machine = job.cluster.nodes == 1 and here.local_world == here.world
    if not job.comm.encrypt or one_machine or job.train.sync.entry.starts_processes or BACKENDS[plan.backend].encrypts:
        return None
    return (
        f"comm.encrypt=true: the gradients of several nodes are sent by {plan.backend}, which cannot encrypt; "
        "comm.backend=gloo, comm.encrypt=false in a private network or over WireGuard or IPsec, or "
        "train.sync=server:async would work"
    )


def launcher_rule(job: Job, plan: Plan) -> str | None:
    """Some backends need ranks that their launcher started."""
    backend = BACKENDS[plan.backend]
    if not backend.launcher or plan.world == 1 or launcher_backend() == backend.name:
        return None
    return (
        f"comm.backend={backend.name} needs ranks that {backend.launcher} started: {backend.launcher} -n {plan.world} "
        f"weft train …; {backend.other} would work"
    )
