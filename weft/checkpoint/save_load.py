"""`weft.save` and `weft.load`: checkpoints of any tensors under any mesh, for your own training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from weft.checkpoint.checkpointer import Checkpointer
from weft.job.files.store_path import as_path
from weft.mesh import Mesh

KEEP_ALL = 1_000_000


def save(
    folder: Path | str, tensors: dict[str, Tensor], mesh: Mesh, *, step: int = 0, meta: dict[str, Any] | None = None
) -> None:
    """Write named tensors, plain or DTensor, as a checkpoint without a layout. Call it on every rank."""
    _checkpointer(folder, mesh).save(step, tensors, meta or {}, wait=True)


def load(folder: Path | str, tensors: dict[str, Tensor], mesh: Mesh) -> dict[str, Any] | None:
    """Fill the tensors from the newest good checkpoint, whatever layout wrote it. Returns step and meta, or None."""
    found = _checkpointer(folder, mesh).load_newest(tensors)
    return None if found is None else {"step": found.step, **found.meta}


def _checkpointer(folder: Path | str, mesh: Mesh) -> Checkpointer:
    return Checkpointer(as_path(str(folder)), group=mesh.host_group, keep=KEEP_ALL, keep_every=0, background=False)
