"""Sends and receives in one batch, and the private name of torch that closes a batch in which one has failed."""

from __future__ import annotations

import contextlib

import torch.distributed as dist


def batch_isend_irecv(ops: list[dist.P2POp]) -> list[dist.Work]:
    """torch's batch_isend_irecv. torch leaves NCCL's group open when an operation in it fails, as all do when a peer is
    lost; no communicator that this thread creates later would then be initialised, so the group is closed here."""
    try:
        return dist.batch_isend_irecv(ops)
    except BaseException:
        backend = ops[0].group._get_backend(ops[0].tensor.device)
        if hasattr(backend, "_group_end"):
            with contextlib.suppress(RuntimeError):  # no group was open
                backend._group_end()
        raise
