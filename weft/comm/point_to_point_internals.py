"""Sends and receives in one batch, and private names of torch and NCCL to recover when one of them fails."""

from __future__ import annotations

import contextlib
import ctypes
import os

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


def _close_group(backend: object, failed_in_nccl: bool) -> None:
    """Both torch and NCCL count the open groups of a thread. When NCCL ends a group with an error, torch counts it as
    open still; then another one is opened in NCCL alone and closed in both."""
    with contextlib.suppress(RuntimeError):
        backend._group_end()  # type: ignore[attr-defined]
        return
    if failed_in_nccl:
        with contextlib.suppress(RuntimeError, OSError, AttributeError):
            ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW).ncclGroupStart()
            backend._group_end()  # type: ignore[attr-defined]
