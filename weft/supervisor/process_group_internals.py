"""Private names of torch's process groups: abort of NCCL, and the sequence numbers of collectives."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
import torch.distributed as dist

NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""For supervised ranks, before process groups are made. Otherwise torch's watchdog ends a process (SIGABRT) whose peer
is lost, or aborts its collectives before the supervisor has ended the attempt, and a step with half a sum could be
committed."""

_aborting = threading.Lock()
_aborted: list[Any] = []
"""Backends that were aborted. They are never destroyed: torch would wait for a thread that waits for their kernels."""


def abort_nccl() -> None:
    """Abort all process groups of NCCL, which waits on the device, so that closing sockets does not interrupt it. Any
    thread may call it: the heartbeat's, and the one that left the collectives. A communicator takes half a second,
    until its service thread polls again, so all are aborted at once."""
    with _aborting:
        if dist.is_initialized() and "nccl" in dist.get_backend():
            from torch.distributed.distributed_c10d import _abort_process_group, _world

            found = []
            for group in list(_world.pg_map):
                with contextlib.suppress(RuntimeError):  # a group of the host alone
                    found.append(group._get_backend(torch.device("cuda")))
            _aborted.extend(found)
            threads = [threading.Thread(target=backend.abort) for backend in found]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            _abort_process_group()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of a process group for a device."""
    return group._get_backend(device)


def sequence_number(backend: Any) -> int:
    """How many collectives a backend has started."""
    number: int = backend._get_sequence_number_for_group()
    return number
