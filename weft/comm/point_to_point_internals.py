"""Sends and receives in one batch, and private names of torch and NCCL to recover when one of them fails."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import torch.distributed as dist


def batch_isend_irecv(ops: list[dist.P2POp]) -> list[dist.Work]:
    """torch's batch_isend_irecv, which leaves NCCL's group call open in this thread when an operation fails, as all do
    when a peer is lost: no communicator that the thread creates later could be used. Here the group is closed."""
    try:
        return dist.batch_isend_irecv(ops)
    except BaseException as error:
        backend = ops[0].group._get_backend(ops[0].tensor.device)
        if hasattr(backend, "_group_end"):
            _close_group(backend, isinstance(error, dist.DistBackendError))
        raise


def _close_group(backend: Any, failed_in_nccl: bool) -> None:
    """End the groups that are open in this thread. Both torch and NCCL count them; when NCCL ends the outermost one
    with an error, torch still counts one, unless an inner one was open too."""
    ended = False
    with contextlib.suppress(RuntimeError):  # the outermost had an error, or none is open
        while True:
            backend._group_end()
            ended = True
    if failed_in_nccl and not ended:  # open another one in NCCL alone, and end it in both
        with contextlib.suppress(RuntimeError, OSError, AttributeError):
            ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW).ncclGroupStart()
            backend._group_end()
