"""The store at which the ranks of a run meet, and the wait for all of them."""

from __future__ import annotations

import datetime
import os
from typing import cast

import torch.distributed as dist

from weft.comm.tcp_store import tcp_store
from weft.hardware.rank_environment import launcher_backend, rank_info, whole_number
from weft.job.comm import BACKENDS
from weft.job.import_by_name import find_object

MIN_RENDEZVOUS_TIMEOUT = datetime.timedelta(seconds=300)
"""Ranks wait at least so long for all to start, whatever the timeout of collectives: importing torch may take a minute
on a busy machine."""


def rendezvous(timeout: datetime.timedelta) -> dist.Store | None:
    """The rendezvous store; None uses the store of torchrun's agent."""
    file = os.environ.get("WEFT_STORE")
    if file:
        return dist.FileStore(file, rank_info().world)
    launched = launcher_backend()
    if launched and launched in BACKENDS and "MASTER_ADDR" not in os.environ:
        return cast(dist.Store, find_object(BACKENDS[launched].meet, "comm.backend")(timeout))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agent or not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    host, port = os.environ["MASTER_ADDR"], whole_number(os.environ, "MASTER_PORT", 1, 65535)
    return tcp_store(host, port, is_master=rank_info().rank == 0, timeout=timeout)


def await_all(store: dist.Store, world: int, timeout: datetime.timedelta) -> None:
    """Wait until all ranks have started."""
    if store.add("weft/arrived", 1) == world:
        store.set("weft/all", "here")
    store.wait(["weft/all"], max(timeout, MIN_RENDEZVOUS_TIMEOUT))
