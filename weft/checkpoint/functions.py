"""The functions layer: checkpoints of any tensors under any mesh, for loops of a person's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from weft.checkpoint.checkpointer import Checkpoints
from weft.mesh import Mesh


def save(
    folder: Path | str, tensors: dict[str, Tensor], mesh: Mesh, *, step: int = 0, meta: dict[str, Any] | None = None
) -> None:
    """Write named tensors, plain or DTensor, as a checkpoint without a layout. Call it on every rank."""
    _checkpoints(folder, mesh).save(step, tensors, meta or {}, wait=True)


def load(folder: Path | str, tensors: dict[str, Tensor], mesh: Mesh) -> dict[str, Any] | None:
    """Fill the tensors from the newest good checkpoint, whatever layout wrote it. Gives its step and meta, or None."""
    found = _checkpoints(folder, mesh).load_newest(tensors)
    return None if found is None else {"step": found.step, **found.meta}


def _checkpoints(folder: Path | str, mesh: Mesh) -> Checkpoints:
    return Checkpoints(Path(folder), group=mesh.host_group, keep=1_000_000, keep_every=0, background=False)
