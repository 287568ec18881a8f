"""How a process leaves the groups of a run that is over, to begin another: with nothing left of them."""

from __future__ import annotations

import contextlib
import gc

import torch.distributed as dist


def leave() -> None:
    """Take the groups down, and all that would keep them: whatever holds a group of Gloo's holds its sockets, and a
    thread that wakes a hundred times a second."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the other ranks may be gone
            dist.destroy_process_group()
    forget_meshes()
    for _ in range(2):  # a tensor that autograd still held at the first try goes at the second
        gc.collect()


def forget_meshes() -> None:
    """Let DTensor forget the groups of a run that has ended: to its caches a mesh of the same shape is the same."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
