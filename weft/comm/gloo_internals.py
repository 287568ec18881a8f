"""Groups of Gloo, encrypted or not, and the private names of torch with which a listener gets an address."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

ENCRYPTED = "gloo_tls"
"""The backend of weft.comm.encrypted_gloo."""


def is_gloo(group: dist.ProcessGroup | None = None) -> bool:
    """Whether a group communicates by Gloo, encrypted or not."""
    return dist.get_backend(group) in ("gloo", ENCRYPTED)


def gloo_at(host: str, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """A Gloo group whose listener has an address of this machine, instead of that of an interface."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=host)], timeout
    return gloo(store, rank, size, options)
