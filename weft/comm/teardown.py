"""Leave the process groups of a finished run completely, so that the process can join another run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
from typing import Any

import torch.distributed as dist

from weft.comm.dtensor_internals import dtensor_caches, forget_meshes


def freeze_imports() -> None:
    """After all imports: exclude them from garbage collection. In a process that forks ranks this comes before the
    forks, which then copy no pages of imported modules."""
    gc.unfreeze()  # frozen objects cannot be found
    _frozen_caches()
    gc.freeze()
    atexit.register(gc.unfreeze)  # Triton's bindings print hundreds of lines about objects that are never collected


def freeze_more() -> None:
    """After leave(): exclude what the run imported too, so that the next leave() does not scan it."""
    _frozen_caches().extend(dtensor_caches())
    gc.freeze()


def leave() -> None:
    """Destroy the process groups and drop every reference to them: a Gloo group keeps sockets open, and a thread that
    polls a hundred times a second."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the other ranks may be gone
            dist.destroy_process_group()
    forget_meshes(_frozen_caches())
    for _ in range(2):  # a tensor that autograd still held during the first collection is freed by the second
        gc.collect()


@functools.cache
def _frozen_caches() -> list[Any]:
    """DTensor's caches found before gc.freeze()."""
    import torch.distributed.tensor  # noqa: F401

    return dtensor_caches()
