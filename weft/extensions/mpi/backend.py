"""The MPI backend: a torch backend over mpi4py, known as `mpi4py`, for stock wheels of torch.

torch's own MPI backend needs a source build and keeps the name mpi for it.
"""

from __future__ import annotations

import datetime
import json
import zlib
from typing import Any

import torch.distributed as dist

from weft.comm.agreement import encode_json
from weft.comm.tcp_store import tcp_store
from weft.extensions.mpi.mpi_group import NAME, MpiGroup
from weft.extensions.mpi.mpi_work import engine, mpi
from weft.hardware.network import own_address
from weft.hardware.rank_environment import rank_info
from weft.job.errors import MachineError

ADDRESS_BYTES = 512
"""The store's address and port as JSON, padded."""


def register() -> None:
    """Register the backend with torch, once per process."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: Any) -> MpiGroup:
    everyone = mpi().COMM_WORLD
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if everyone.Get_rank() != ranks[options.group_rank] or max(ranks) >= everyone.Get_size():
        raise MachineError(
            f"this process is rank {ranks[options.group_rank]} of {len(ranks)}, but rank {everyone.Get_rank()} of "
            f"{everyone.Get_size()} in MPI: comm.backend=mpi needs them to be the same; start it by mpirun alone"
        )
    # only members call this, with a tag for the group, since several groups may be created at once
    members = everyone.Get_group().Incl(ranks)
    tag = zlib.crc32(str(options.group_id).encode()) % 32749
    with engine().lock:
        return MpiGroup(everyone.Create_group(members, tag), options.timeout)


def meet(timeout: datetime.timedelta) -> dist.Store:
    """A store that all ranks of an MPI world share: rank 0 opens it on a free port and broadcasts the address."""
    everyone, here = mpi().COMM_WORLD, rank_info()
    message = bytearray(ADDRESS_BYTES)  # mpi4py would pickle anything but a buffer
    if here.rank > 0:
        everyone.Bcast(message)
        address, port = json.loads(message.rstrip(b"\0"))
        return tcp_store(address, port, is_master=False, timeout=timeout)
    address = "127.0.0.1" if here.local_world == here.world else own_address()
    store = tcp_store(address, 0, is_master=True, timeout=timeout)
    text = encode_json((address, store.port))
    message[: len(text)] = text
    everyone.Bcast(message)
    return store
