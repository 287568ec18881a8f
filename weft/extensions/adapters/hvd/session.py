"""init() and shutdown(): the ranks of this process, and what they were built with."""

from __future__ import annotations

import atexit
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.comm.teardown import leave
from weft.extensions.adapters.hvd.engine import CollectiveEngine
from weft.extensions.adapters.hvd.process_sets import ProcessSet, add_process_set, forget_process_sets, use_engine
from weft.extensions.adapters.layout import join_ranks
from weft.hardware.rank_environment import rank_info
from weft.job.errors import JobError
from weft.job.schema import Job
from weft.mesh import Mesh
from weft.planner.plan import Plan


@dataclass
class Joined:
    """The ranks that this process has joined, between init() and shutdown()."""

    plan: Plan
    mesh: Mesh
    engine: CollectiveEngine


_joined: list[Joined] = []
"""Horovod's functions take no mesh, so it is kept here."""


def init(comm: Iterable[int] | None = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Join the ranks that torchrun, Weft or MPI started. Collective, as is the creation of process sets."""
    if _joined:
        return
    world = rank_info().world
    if comm is not None and (not isinstance(comm, Iterable) or list(comm) not in ([], list(range(world)))):
        raise JobError(
            f"hvd.init(comm={comm!r}) is not supported; hvd.init() and hvd.add_process_set(ranks) would work"
        )
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise JobError(f"hvd.init(process_sets={process_sets!r}): a list of hvd.ProcessSet or 'dynamic' would work")
    if not dist.is_initialized():
        atexit.register(leave)  # shutdown() keeps the process group, since init() may follow
    plan, mesh = join_ranks(Job(precision="fp32"))
    engine = CollectiveEngine(mesh)
    _joined.append(Joined(plan, mesh, engine))
    use_engine(engine)
    atexit.register(shutdown)
    try:
        for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
            add_process_set(process_set)
    except ValueError:
        shutdown()
        raise


def joined() -> Joined:
    """The ranks; an error before init()."""
    if not _joined:
        raise ValueError("hvd.init() was not called")
    return _joined[0]


def is_initialized() -> bool:
    return bool(_joined)


def shutdown() -> None:
    """Leave the ranks. Collectives under way on them fail."""
    while _joined:
        _joined.pop().engine.close()
    use_engine(None)
    forget_process_sets()
    atexit.unregister(shutdown)


def rank() -> int:
    return joined().mesh.rank


def size() -> int:
    return joined().mesh.world


def local_rank() -> int:
    joined()
    return rank_info().local_rank


def local_size() -> int:
    joined()
    return rank_info().local_world


def cross_rank() -> int:
    """The number of this rank's node."""
    return rank() // local_size()


def cross_size() -> int:
    """The number of nodes."""
    return -(-size() // local_size())


def is_homogeneous() -> bool:
    """Whether every node has as many ranks."""
    return size() % local_size() == 0


def mpi_built() -> bool:
    """Whether torch was built with MPI."""
    return dist.is_mpi_available()


def mpi_enabled() -> bool:
    """Whether messages are MPI's. They are Gloo's or NCCL's, also where mpirun has started the ranks."""
    return False


def mpi_threads_supported() -> bool:
    raise ValueError("MPI is not in use; hvd.mpi_enabled() tells")


def gloo_built() -> bool:
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    return dist.is_gloo_available()


def nccl_built() -> int:
    """NCCL's version as one number, such as 22707; 0 without NCCL."""
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
    return int(10000 * major + 100 * minor + patch)


def cuda_built() -> bool:
    return torch.version.cuda is not None


def rocm_built() -> bool:
    return torch.version.hip is not None


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    raise JobError("hvd.start_timeline is not supported; torch.profiler.profile() records each collective of a script")


def stop_timeline() -> None:
    raise JobError("hvd.stop_timeline is not supported; torch.profiler.profile() records each collective of a script")
