"""A checkpoint's tensors, whole, in the memory of one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from weft.checkpoint.format import Damaged, check_file
from weft.checkpoint.reader import Index
from weft.comm.agreement import in_words


def load_full(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor whose name starts with prefix, whole, in host memory; one process, no process group."""
    index = Index(path)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.tensors.items()
        if name.startswith(prefix)
    }
    needed = {".metadata"}.union(*(index.where.get(name, ()) for name in tensors))
    for name in sorted(needed):
        if why := check_file(path, name, index.files[name]):
            raise Damaged(path, why)
    try:
        index.fill(tensors, None)
    except (CheckpointException, Exception) as error:
        raise Damaged(path, f"its files are whole, but it cannot be loaded: {in_words(error)}") from error
    return tensors
