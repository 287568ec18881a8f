"""How a process leaves the groups of a run that is over, to begin another: with nothing left of them."""

from __future__ import annotations

import contextlib
import functools
import gc
from typing import Any

import torch.distributed as dist


def settle() -> None:
    """Once all is imported: that stays, and need not be looked at whenever a run is over. A process whose forks are
    ranks does so before them: they copy no page to look or to count references."""
    gc.unfreeze()  # nothing that is set aside can be found
    _first_caches()
    gc.freeze()


def set_aside() -> None:
    """After leave(): what a run imported on its way stays as well, and the next leave() need not look at it."""
    _first_caches().extend(_caches())
    gc.freeze()


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
    """Let DTensor forget the meshes of a run that has ended: its caches hold them, and take one of the same shape for
    the same."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # since torch 2.12
        _redistribute.clear_redistribute_planner_cache()
    for cache in [*_first_caches(), *_caches()]:
        cache.cache_clear()


@functools.cache
def _first_caches() -> list[Any]:
    """Those of what is set aside, where they cannot be found any more."""
    import torch.distributed.tensor  # noqa: F401

    return _caches()


def _caches() -> list[Any]:
    """What DTensor remembers by functools; torch has no list of it, and makes more as it goes."""
    found = [x for x in gc.get_objects() if type(x) is functools._lru_cache_wrapper]
    return [x for x in found if str(getattr(x, "__module__", "")).startswith("torch.distributed.tensor")]
