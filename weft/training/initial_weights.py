"""The weights that a run starts from, where they are not random: a published checkpoint, or an imported one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from weft.checkpoint.format import WEIGHTS_ONLY, Damaged, entries, read_meta
from weft.checkpoint.reader import Index
from weft.job.errors import JobError
from weft.job.files.run_folder import RunDir
from weft.job.files.store_path import AnyPath
from weft.job.import_by_name import find_object
from weft.job.interchange import implementation_of
from weft.job.schema import Job
from weft.mesh import Mesh

InitialWeights = Callable[[dict[str, Tensor], dict[str, Tensor]], None]
"""Fills this rank's shards of named parameters in place, and those of the named buffers that the source holds."""


def initial_weights(job: Job, run: RunDir, mesh: Mesh, *, at_start: bool = True) -> InitialWeights | None:
    """What fills the weights of a run that begins at step 0; None for random weights.

    With `at_start` also None if there is a checkpoint to resume from.
    """
    folder: AnyPath = run.checkpoints_in(job.checkpoint.to)
    resumes, imported = mesh.all_gather_json(_on_disk(folder) if mesh.rank == 0 else None)[0]
    if resumes and at_start:
        return None
    if folder != run.checkpoints and not imported:  # `weft import` writes to the run folder
        folder = run.checkpoints
        imported = mesh.all_gather_json(_on_disk(folder)[1] if mesh.rank == 0 else None)[0]
    if imported:
        return lambda params, buffers: _fill(folder / imported, params, buffers)
    return published_weights(job)


def published_weights(job: Job) -> InitialWeights | None:
    """What fills the weights from model.pretrained, if it is set."""
    name = job.model.pretrained
    if name is None:
        return None
    weights = find_object(implementation_of(job.model.family).weights, "model.pretrained")
    return lambda params, buffers: weights(name, job.model).fill(params | buffers)


def _on_disk(folder: AnyPath) -> tuple[bool, str | None]:
    """Whether there is a checkpoint to resume from, and the name of one that holds weights only."""
    good = [entry for entry in entries(folder) if entry.kind == "good"]
    imported = next((entry.path.name for entry in good if entry.step == 0 and _is_imported(entry.path)), None)
    return any(entry.path.name != imported for entry in good), imported


def _is_imported(path: AnyPath) -> bool:
    try:
        return bool(read_meta(path).get(WEIGHTS_ONLY))
    except (Damaged, JobError):
        return False


def _fill(path: AnyPath, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    index = Index(path)
    saved = {f"model.{n}": t for n, t in params.items()}
    saved = {n: t for n, t in saved.items() if n in index.tensors or ".lora." not in n}  # adapters start as they are
    saved |= {f"buffer.{n}": t for n, t in buffers.items() if f"buffer.{n}" in index.tensors}
    if text := index.mismatch(saved):
        raise JobError(text)
    index.fill(saved)
